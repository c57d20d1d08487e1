"""What goes to which standard stream, and what happens if a stream is closed or can't be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers import preloaded
from tests.helpers.paths import TINYNET

from dtype_engine import cli

PRINTING = """
import atexit, ctypes, os, subprocess, sys
import torch

def leak(place):
    print("LEAK of Python", place)
    print("LEAK past sys.stdout", place, file=sys.__stdout__)

leak("file")
ctypes.CDLL(None).puts(b"LEAK of C")
os.write(1, b"LEAK of a descriptor\\n")
subprocess.run(["echo", "LEAK of a process"])
atexit.register(leak, "end")

class Net(torch.nn.Linear):
    def __init__(self):
        leak("constructor")
        super().__init__(4, 4)
    def forward(self, x):
        leak("forward")
        return super().forward(x)

def example_inputs():
    leak("inputs")
    return (torch.ones(1, 4),)
"""
COMMANDS = {
    "inspect": ("inspect",),
    "drift": ("drift", "--cast", "*=bf16", "--causes"),
    "flow": ("flow", "--cast", "*=bf16"),
    "speed": ("speed", "--repeats", "3"),
    "scan": ("scan", "--dtypes", "bf16"),
    "presets": ("recipe", "presets"),
}
WITH_FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
CASTING = ("drift", f"{TINYNET}:TinyNet", "--cast", "*=bf16")


FRESH = (sys.executable, "-c", preloaded.COMMAND)
"""The program in a new interpreter, since a stream that is closed at the start of an interpreter is None."""


def shell(streams: str, *arguments: str, program: Sequence[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the program with streams redirected by a shell."""
    command = [*(program or preloaded.command(preloaded.COMMAND)), *arguments]
    return subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {streams}', *command], capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def printing(tmp_path: Path) -> str:
    """Return a model whose code prints in every possible way wherever it runs."""
    (tmp_path / "printing.py").write_text(PRINTING)
    return f"{tmp_path / 'printing.py'}:Net"


@pytest.mark.parametrize("command", COMMANDS)
def test_prints_of_model_code_do_not_reach_standard_output(printing: str, command: str) -> None:
    said = preloaded.run(preloaded.COMMAND, *COMMANDS[command], printing)
    assert said.returncode == 0
    assert said.stdout.strip()
    assert "LEAK" not in said.stdout
    as_object = preloaded.run(preloaded.COMMAND, *COMMANDS[command], printing, "--json")
    assert isinstance(json.loads(as_object.stdout), dict)
    for done in (said, as_object):
        for way in ("of Python end", "past sys.stdout constructor", "of C", "of a descriptor", "of a process"):
            assert f"LEAK {way}" in done.stderr


def test_only_one_file_of_the_commands_calls_click_echo() -> None:
    """Output by click while a command runs goes to standard error, like the prints of model code."""
    files = sorted(Path(cli.__file__).parent.glob("*.py"))
    assert [file.name for file in files if "click.echo(" in file.read_text()] == ["program.py"]


def test_help_goes_to_standard_output() -> None:
    done = preloaded.run(preloaded.COMMAND, "drift", "--help")
    assert done.stdout.startswith("Usage: dtype-engine drift")
    assert done.stderr == ""


def test_closed_standard_error_does_not_affect_the_output(printing: str) -> None:
    """No file that is opened gets the descriptor number 2, either."""
    code = Path(printing.removesuffix(":Net"))
    code.write_text(code.read_text() + "assert open(__file__).fileno() > 2\n")
    done = shell("2>&-", "drift", printing, "--cast", "*=bf16", program=FRESH)
    assert done.returncode == 0
    assert done.stdout.startswith("model ")
    assert "SQNR" in done.stdout
    assert "LEAK" not in done.stdout


@pytest.mark.parametrize("streams", ["2>&-", "2</dev/null"])
def test_closed_standard_error_keeps_the_exit_status(streams: str) -> None:
    done = shell(streams, "drift", "no such model", program=FRESH)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.parametrize("streams", ["2</dev/null", pytest.param("2>/dev/full", marks=WITH_FULL)])
def test_note_that_cannot_be_printed_does_not_change_the_exit_status(tmp_path: Path, streams: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('version: 1\nmodel: other\nrules:\n  - {pattern: "*", dtype: bfloat16}\n')
    done = shell(streams, "drift", f"{TINYNET}:TinyNet", "--recipe", str(recipe))
    assert done.returncode == 0
    assert "SQNR" in done.stdout


@pytest.mark.parametrize("arguments", [CASTING, ("--help",), ("stdio",)])
def test_command_exits_before_its_work_if_standard_output_is_closed(arguments: tuple[str, ...]) -> None:
    done = shell(">&-", *arguments, program=FRESH)
    assert done.returncode == 2
    assert done.stderr == "dtype-engine: standard output is closed, and answers go there: redirect it to a file\n"


def test_closed_standard_input_does_not_affect_the_output() -> None:
    assert shell("<&-", *CASTING, program=FRESH).returncode == 0
    assert shell(">&- 2>&-", *CASTING, program=FRESH).returncode == 2


ANSWERING = [CASTING, (*CASTING, "--json"), ("inspect",), ("scan", "--help")]


@pytest.mark.parametrize("arguments", ANSWERING)
def test_closed_pipe_ends_the_program_silently(arguments: tuple[str, ...]) -> None:
    """The status is not 1, which would mean a missed limit."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [*preloaded.command(preloaded.COMMAND), *arguments]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@WITH_FULL
@pytest.mark.parametrize("arguments", ANSWERING)
def test_full_disk_is_reported_in_one_sentence(arguments: tuple[str, ...]) -> None:
    done = shell(">/dev/full", *arguments)
    assert done.returncode == 2
    assert done.stderr == "dtype-engine: standard output can't be written: No space left on device\n"


@WITH_FULL
@pytest.mark.parametrize("command", [CASTING, ("scan", CASTING[1], "--dtypes", "bf16")], ids=lambda words: words[0])
def test_saved_measurement_is_kept_if_the_disk_for_standard_output_is_full(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    saved = tmp_path / "saved.json"
    words = (*command, "--json", "--save", str(saved))
    assert shell(">/dev/full", *words).returncode == 2
    written = saved.stat().st_mtime_ns
    again = shell("", *words)
    assert again.returncode == 0
    assert isinstance(json.loads(again.stdout), dict)
    assert saved.stat().st_mtime_ns == written  # nothing was measured that had to be written


# -- encodings that lack characters --------------------------------------------------------------------------------------

ENCODINGS = {
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "cp1252": {"PYTHONIOENCODING": "cp1252"},
    "ascii": {"PYTHONIOENCODING": "ascii:strict"},
    "the locale C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}
NAME = "ü.Δ.😀.weight"


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """Write a checkpoint with a tensor name whose characters no single-byte encoding has together."""
    save_file({NAME: torch.ones(4, 4)}, tmp_path / "named.safetensors")
    return tmp_path / "named.safetensors"


def in_encoding(name: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    environment = {key: value for key, value in os.environ.items() if key not in ("LANG", "PYTHONIOENCODING")}
    command = [*FRESH, *arguments]
    return subprocess.run(command, capture_output=True, timeout=120, env=environment | ENCODINGS[name])


@pytest.mark.slow
def test_unencodable_character_in_a_drift_report_is_escaped() -> None:
    as_at_a_start = (
        "import sys; sys.stdout.reconfigure(encoding='cp1252', errors='strict'); "  # as for PYTHONIOENCODING
    )
    program = preloaded.command(as_at_a_start + preloaded.COMMAND)
    words = ("drift", "--cast", "*.mlp=fp8", "--prompt", "import os")
    done = subprocess.run([*program, *words], capture_output=True, timeout=120)
    assert done.returncode == 0
    assert b"\\u0394p" in done.stdout
    assert b"UnicodeEncodeError" not in done.stderr


@pytest.mark.parametrize("name", ENCODINGS)
def test_json_output_is_valid_in_every_encoding_of_standard_output(named: Path, name: str) -> None:
    done = in_encoding(name, "inspect", str(named), "--json")
    assert done.returncode == 0
    encoding = name if name.islower() else "ascii"
    assert [tensor["name"] for tensor in json.loads(done.stdout.decode(encoding))["tensors"]] == [NAME]


@pytest.mark.parametrize("name", ENCODINGS)
def test_unencodable_characters_in_names_are_escaped(named: Path, name: str) -> None:
    done = in_encoding(name, "inspect", str(named), "--top", "1")
    assert done.returncode == 0
    encoding = name if name.islower() else "ascii"
    assert NAME.removesuffix(".weight").encode(encoding, "backslashreplace") in done.stdout


def test_error_with_unencodable_characters_is_printed_escaped(tmp_path: Path) -> None:
    done = in_encoding("ascii", "inspect", str(tmp_path / "Δ"))
    assert done.returncode == 2
    assert b"\\u0394: no such folder or file" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_converted_recipe_that_standard_output_cannot_encode_is_refused(named: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f'version: 1\nrules:\n  - {{pattern: "{NAME}", dtype: bfloat16}}\n', encoding="utf-8")
    words = ("recipe", "convert", str(recipe), "--model", str(named), "--to", "transformers")
    done = in_encoding("latin-1", *words)
    assert done.stdout == b""
    assert done.returncode == 2
    assert b", which lacks characters of this file: name a file with -o" in done.stderr
    assert in_encoding("latin-1", *words, "-o", str(tmp_path / "out.txt")).returncode == 0
    assert "Δ" in (tmp_path / "out.txt").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["undefined", "idna"])
def test_encoding_that_lacks_ascii_is_replaced(encoding: str, named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    done = subprocess.run([*FRESH, "inspect", str(named)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert len(done.stdout.splitlines()) > 3
    done = subprocess.run([*FRESH, "inspect", "nosuch"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dtype-engine: ")
