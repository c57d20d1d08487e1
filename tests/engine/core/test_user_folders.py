"""Paths that begin with a home folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.paths import ROOT

from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.input_args import parse_inputs_line
from dtype_engine.core.options import Options
from dtype_engine.core.user_folders import expanded


def test_leading_tilde_is_replaced_as_in_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/x") == Path("/home/me/x")
    assert expanded(Path("~")) == Path("/home/me")
    for unchanged in ("x/~", "~nosuchuser/x", "~\0", "~\ud800/x"):
        assert expanded(unchanged) == Path(unchanged)


def test_home_folders_are_replaced_by_one_function_alone() -> None:
    """`Path.expanduser` raises RuntimeError for an unknown user."""
    packages = (ROOT / "engine" / "dtype_engine", ROOT / "tui" / "dtype_tui")
    files = [file.name for folder in packages for file in folder.rglob("*.py") if ".expanduser(" in file.read_text()]
    assert files == ["user_folders.py"]


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "~nosuchuser/x"),
        ("inspect", "~nosuchuser/x.py:Net"),
        ("inspect", "~nosuchuser/x:Net"),
        ("export", "--cast", "*=bf16", "demo", "-o", "~nosuchuser/x"),
        ("export", "--cast", "*=bf16", "demo", "-o", "~nosuchuser/x.safetensors"),
        ("report", "--cast", "*=bf16", "demo", "-o", "~nosuchuser/x.md"),
        ("drift", "--cast", "*=bf16", "demo", "--save", "~nosuchuser/x.json"),
        ("drift", "--cast", "*=bf16", "demo", "--against", "~nosuchuser/x"),
        ("drift", "--recipe", "~nosuchuser/x.yaml"),
    ],
)
def test_path_in_the_home_folder_of_an_unknown_user_is_refused_in_one_sentence(
    words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(cli, "dtype-engine", words) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert "nosuchuser" in said.err
    assert "unexpected" not in said.err
    assert said.err.count("\n") == 1


def test_cache_in_the_home_folder_of_an_unknown_user_is_empty(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "~nosuchuser/cache")
    assert run(cli, "dtype-engine", ["inspect", "org/name"]) == 2
    assert "no Hugging Face model of this name is in the local cache (~nosuchuser/cache)" in capfd.readouterr().err


def test_prompt_that_begins_like_a_home_folder_is_a_prompt() -> None:
    for line in ("~nosuchuser said", "~nosuchuser", "~\0"):
        assert parse_inputs_line(Options(), line).prompts == (line,)
