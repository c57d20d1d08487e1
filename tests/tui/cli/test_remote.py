"""What `ssh://HOST/PATH` and --engine-command start, and the error message if no engine answers."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from dtype_engine.core.errors import UserError
from dtype_engine.core.options import Options
from dtype_engine.recipe import Recipe
from dtype_tui.cli.remote import Address, address_of, command_from, command_of, connect, reference_there


@pytest.mark.parametrize(
    ("typed", "means"),
    [
        ("ssh://gpu", Address("gpu", None, None)),
        ("ssh://gpu/", Address("gpu", None, None)),
        ("ssh://gpu/models/a b", Address("gpu", None, "/models/a b")),
        ("ssh://gpu/~/m.gguf", Address("gpu", None, "~/m.gguf")),
        ("ssh://me@gpu.lab:2222/~/net.py:Net", Address("me@gpu.lab", "2222", "~/net.py:Net")),
        ("ssh://[::1]:22/x", Address("::1", "22", "/x")),
        ("ssh://gpu/$(touch x);`y`", Address("gpu", None, "/$(touch x);`y`")),
    ],
)
def test_ssh_address_is_parsed_into_host_and_path(typed: str, means: Address) -> None:
    assert address_of(typed) == means


@pytest.mark.parametrize(
    "typed",
    [
        "ssh://",
        "ssh:///models",
        "ssh://-oProxyCommand=touch x/y",
        "ssh://-l/y",
        "ssh://-x@host/y",
        "ssh://me@-host/y",
        "ssh://a b/y",
        "ssh://host;x/y",
        "ssh://host:port/y",
        "ssh://me:secret@host/y",
        "ssh://host\n-x/y",
    ],
)
def test_invalid_ssh_address_is_refused(typed: str) -> None:
    with pytest.raises(UserError, match="is no address"):
        address_of(typed)


def test_path_and_host_of_an_ssh_address_cannot_inject_commands() -> None:
    command = command_of(address_of("ssh://me@gpu:2222/a;b$(c)"))
    for arguments in (command.arguments, command.unattended):
        assert arguments[0] == "ssh"
        assert "-T" in arguments
        end = arguments[arguments.index("--") + 1 :]
        assert end[0] == "me@gpu"
        assert len(end) == 2
        assert end[1].startswith("dtype-engine stdio --compressed")
        assert not any("a;b" in argument for argument in arguments)
        assert arguments[arguments.index("-p") + 1] == "2222"
    assert "BatchMode=yes" in command.unattended
    assert "BatchMode=yes" not in command.arguments


def test_engine_command_is_split_as_by_a_shell_but_run_without_one(tmp_path: Path) -> None:
    assert command_from("docker exec -i 'my box' dtype-engine stdio").arguments == (
        "docker", "exec", "-i", "my box", "dtype-engine", "stdio"
    )  # fmt: skip
    for line in ("", "   ", "docker 'exec"):
        with pytest.raises(UserError, match="--engine-command"):
            command_from(line)
    with pytest.raises(UserError):
        connect(None, f"echo hello > {tmp_path / 'x'}", Options(), Recipe())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("echo 'dtype-engine: command not found' >&2; exit 127", "pip install dtype-tui there"),
        ("echo 'Error: No such command' >&2; exit 2", "an older dtype-tui"),
        ("echo 'out of quota' >&2; exit 9", "it ended with status 9: out of quota"),
        ("printf '\\033[2Jmotd\\n'", "it ended with status 0"),
    ],
    ids=["not there", "older", "refused", "motd alone"],
)
def test_failing_remote_engine_is_explained_in_one_sentence(program: str, words: str) -> None:
    with pytest.raises(UserError, match=r"\w") as told:
        connect(None, shlex.join(["sh", "-c", program]), Options(), Recipe())
    assert words in str(told.value)
    assert str(told.value).isprintable()


def test_error_message_of_ssh_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "ssh"
    fake.write_text("#!/bin/sh\necho 'ssh: connect to host gpu port 22: No route to host' >&2\nexit 255\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(UserError, match=r"gpu can't be reached: ssh: connect to host gpu port 22: No route to host"):
        connect("ssh://gpu/x", None, Options(), Recipe())


@pytest.mark.slow
def test_missing_remote_model_or_input_is_reported_before_the_screen() -> None:
    engine = shlex.join([sys.executable, "-m", "dtype_engine.service.stdio"])
    with pytest.raises(UserError, match="/nowhere/at/all: no such folder"):
        connect("/nowhere/at/all", engine, Options(), Recipe())
    with pytest.raises(UserError, match=r"/nowhere/text\.txt"):
        connect("demo", engine, Options(texts=(Path("/nowhere/text.txt"),)), Recipe())


@pytest.mark.parametrize(
    ("model", "reference", "there"),
    [
        ("ssh://gpu/b", "ssh://gpu/a", "/a"),
        ("ssh://me@gpu:22/b", "ssh://me@gpu:22/~/a", "~/a"),
        ("ssh://gpu/b", "ssh://gpu", "demo"),
        ("ssh://gpu/b", "stored", "stored"),
        ("ssh://gpu/b", "a", None),
        ("b", "ssh://gpu/a", None),
        ("ssh://gpu/b", "ssh://other/a", None),
        ("ssh://gpu:22/b", "ssh://gpu/a", None),
    ],
)
def test_reference_checkpoint_must_be_on_the_machine_of_the_model(
    model: str, reference: str, there: str | None
) -> None:
    if there is not None:
        assert reference_there(model, Options(reference=reference)) == there
        return
    with pytest.raises(UserError, match="must be on one machine"):
        reference_there(model, Options(reference=reference))
