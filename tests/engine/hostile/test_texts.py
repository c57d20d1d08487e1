"""Recipes, saved scans and other text files of this program, written by an attacker: no code runs, nothing hangs, and every refusal
is one line.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch
from safetensors.torch import save_file

from dtype_engine.checkpoint.source import locate
from dtype_engine.cli import cli
from dtype_engine.cli.program import BAD_INPUT, TRACEBACK, run
from dtype_engine.core.atomic_write import check_target
from dtype_engine.core.errors import UserError
from dtype_engine.core.input_args import check_files
from dtype_engine.core.options import Options
from dtype_engine.core.text import printable
from dtype_engine.recipe.file import read_recipe_file
from dtype_engine.runtime.scan.routing import TopKSample
from dtype_engine.runtime.scan.saved import Fingerprint, SavedScan
from dtype_engine.runtime.scan.saved import read as read_scan
from dtype_engine.runtime.scan.saved import read_any as read_any_scan
from dtype_engine.runtime.scan.saved import write as write_scan
from dtype_engine.runtime.scan.scores import SequenceScores
from dtype_engine.search.constraints import parse_bytes
from dtype_tui.state.session_store import read_session

RULES = 'rules:\n  - {pattern: "*", dtype: bf16}\n'


def test_recipe_cannot_name_python_code_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "ran"
    code = "import torch\ndef Net():\n    return torch.nn.Linear(4, 4)\n"
    (tmp_path / "planted_net.py").write_text(f"open({str(mark)!r}, 'w')\n{code}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    recipe = tmp_path / "r.yaml"
    for model in ("planted_net.py:Net", f"{tmp_path}/planted_net.py:Net", "planted_net:Net", "planted_net.inner:Net"):
        recipe.write_text(f"version: 1\nmodel: {model}\n{RULES}")
        for command in (["lint", str(recipe), "--for", "torchao"], ["convert", str(recipe), "--to", "torchao"]):
            assert run(cli, "dtype-engine", ["recipe", *command]) == BAD_INPUT
            said = capsys.readouterr()
            assert said.out == ""
            assert said.err.count("\n") == 1
            assert "name it with --model" in said.err
            assert not mark.exists()
    # The user may name it.
    named = ["--model", "planted_net.py:Net"]
    assert run(cli, "dtype-engine", ["recipe", "lint", str(recipe), "--for", "torchao", *named]) in (0, 1)
    assert mark.exists()


def test_recipe_file_may_name_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "net.safetensors")
    (tmp_path / "r.yaml").write_text(f"version: 1\nmodel: {tmp_path}/net.safetensors\n{RULES}")
    assert run(cli, "dtype-engine", ["recipe", "convert", str(tmp_path / "r.yaml"), "--to", "transformers"]) == 0
    assert "bfloat16" in capsys.readouterr().out


ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]\n" for number in range(1, 12)
)
TEXTS = {
    "aliases": (f"{ALIASES}version: *a11\n{RULES}", "anchors and aliases"),
    "one alias": (f"version: 1\nmodel: &m x\n{RULES}measured: {{a: *m}}\n", "anchors and aliases"),
    "merge key": (f"version: 1\n{RULES}measured: {{<<: {{a: 1}}}}\n", "merge keys (<<) are not read"),
    "merge keys": (f"version: 1\n<<: [{{model: x}}]\n{RULES}", "merge keys (<<) are not read"),
    "two lists of rules": (f"version: 1\n{RULES}{RULES}", "in line 4: the key rules occurs twice"),
    "two dtypes": ("version: 1\nrules: [{pattern: a, dtype: bf16, dtype: int8}]\n", "the key dtype occurs twice"),
    "no such day": (f"version: 2024-13-45\n{RULES}", "not a valid timestamp"),
    "no such number": (f'version: !!int "zz"\n{RULES}', "not a valid int"),
    "no such truth": (f"version: !!bool maybe\n{RULES}", "not a valid bool"),
    "no such time": (f"version: !!timestamp abc\n{RULES}", "not a valid timestamp"),
    "no number at all": (f'version: !!int ""\n{RULES}', "not a valid int"),
    "long number": (f"version: {'9' * 5000}\n{RULES}", "not a valid int"),
    "long number in hex": (f"version: 0x{'f' * 100_000}\n{RULES}", "not a valid int"),
    "deep list": (f"version: {'[' * 3000}{']' * 3000}\n{RULES}", "nested too deep"),
    "deep block": ("".join(f"{' ' * depth}- \n" for depth in range(300)), "not valid YAML"),
    "python object": (f"version: !!python/object/apply:os.system [id]\n{RULES}", "not valid YAML"),
    "list for a pattern": ("version: 1\nrules: [{pattern: [a], dtype: bf16}]\n", "must be strings"),
    "bytes": ("\ufffe\x00", "not valid YAML"),
    "long range": (f'version: 1\nrules: [{{pattern: "{{0..{"9" * 5000}}}", dtype: bf16}}]\n', "too many digits"),
    "brackets": (f'version: 1\nrules: [{{pattern: "re:{"(" * 5000}", dtype: bf16}}]\n', "too long"),
    "repeats": ('version: 1\nrules: [{pattern: "re:a{99999999999}", dtype: bf16}]\n', "repeats more than"),
    "unknown key": (f"version: 1\n? {'[' * 30}{']' * 30}\n: 1\n{RULES}", "not valid"),
    "too long": (f"version: 1 #{'x' * 1_000_001}\n{RULES}", "too many"),
}


@pytest.mark.parametrize("what", TEXTS)
def test_hostile_recipe_is_refused_in_one_line_with_its_path(tmp_path: Path, what: str) -> None:
    text, says = TEXTS[what]
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_recipe_file(path)
    said = str(caught.value)
    assert says in said
    assert str(path) in said
    assert said.isprintable()
    assert len(said) < 600


SPECIAL: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "a socket": lambda path: _socket(path),
}


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


READERS: dict[str, Callable[[Path], object]] = {
    "recipe": read_recipe_file,
    "session": read_session,
    "scan": lambda path: read_scan(path, Fingerprint("", "", (), ""), None),
    "text": lambda path: check_files(Options(texts=(path,))),
    "image": lambda path: check_files(Options(images=(path,))),
    "sound": lambda path: check_files(Options(audio=(path,))),
    "tensors": lambda path: check_files(Options(tensors=path)),
    "checkpoint": lambda path: locate(str(path)).open(),
}


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("reader", READERS)
def test_reading_a_special_file_never_blocks(tmp_path: Path, reader: str, special: str) -> None:
    """A hang would exceed the time limit of the test."""
    path = tmp_path / "x.safetensors"
    SPECIAL[special](path)
    with pytest.raises(UserError) as caught:
        READERS[reader](path)
    assert "\n" not in str(caught.value)


def test_line_endings_of_text_files_are_normalized(tmp_path: Path) -> None:
    from dtype_engine.core.input_limits import InputLimits
    from dtype_engine.core.regular_files import read_text

    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n")
    assert read_text(tmp_path / "a.txt", InputLimits()) == (tmp_path / "a.txt").read_text()


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000 + "]" * 100_000,
        "[]",
        '{"version": 2}',
        '{"version": [[1]]}',
        "9" * 9999,
        '{"version": 2, "fingerprint": {"dtypes": 5}}',
        '{"version": 2, "fingerprint": [1]}',
    ],
)
def test_invalid_saved_scan_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "scan.json").write_text(content)
    with pytest.raises(UserError, match=r"scan\.json"):
        read_scan(tmp_path / "scan.json", Fingerprint("", "", (), ""), None)


def test_saved_scan_with_nan_scores_is_refused(tmp_path: Path) -> None:
    nan, path, key = float("nan"), tmp_path / "scan.json", ("a", "int8")
    made = Fingerprint("", "", ("int8",), "")
    whole = SequenceScores(1.0, {key: 0.5}, {key: nan}, True, [TopKSample(0, 0.1, [nan], 0.2)], {})
    exact = SavedScan(made, 1, "x", 0.0, 0.0, 1, {}, {key: (0.5, None)})
    estimated = dataclasses.replace(exact, done={0: whole}, measured=None)
    for scan in (exact, estimated):  # variances and margins may be NaN where the model is not finite
        write_scan(path, scan)
        assert read_any_scan(path).count == 1
    for scan in (
        dataclasses.replace(exact, measured={key: (nan, None)}),
        dataclasses.replace(estimated, done={0: dataclasses.replace(whole, sums={key: nan})}),
    ):
        write_scan(path, scan)
        with pytest.raises(UserError, match=r"scan\.json is not a saved scan \(a score is NaN\)"):
            read_any_scan(path)


@pytest.mark.parametrize("name", ["a\u3164b", "a\u115fb", "a\u1160b", "a\uffa0b"])
def test_invisible_letters_are_escaped(name: str) -> None:
    assert printable(name) == f"a\\u{ord(name[1]):04x}b"
    assert printable("한글 ㄱ") == "한글 ㄱ"


@pytest.mark.parametrize("model", ["x" * 5000, "a/" * 3000, "~nobody-of-this-name/x", "x" * 5000 + ":Net", "a\0b"])
def test_impossible_path_of_a_model_is_refused_in_a_short_line(model: str) -> None:
    with pytest.raises(UserError) as caught:
        locate(model)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("error", "says"),
    [(RecursionError("maximum recursion depth exceeded"), "unexpected RecursionError: maximum"),
     (ValueError("one\ntwo\x1b[2J"), r"unexpected ValueError: one two\x1b[2J"), (MemoryError(), "there is not enough memory"),
     (OSError(36, "File name too long", "x" * 5000), "can't read or write xxx"), (OSError(5), "unexpected OSError: 5"),
     (OverflowError(), "unexpected OverflowError;"),
     (KeyError("q8_0"), "unexpected KeyError: 'q8_0'")],
)  # fmt: skip
def test_unexpected_error_is_printed_in_one_line_with_exit_status_2(
    error: Exception, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    def failing() -> None:
        raise error

    monkeypatch.delenv(TRACEBACK, raising=False)
    assert run(failing, "dtype-engine", []) == BAD_INPUT
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"dtype-engine: {says}")
    assert said.err.count("\n") == 1
    monkeypatch.setenv(TRACEBACK, "1")
    assert run(failing, "dtype-engine", []) == BAD_INPUT
    assert "in failing" in capsys.readouterr().err


def test_program_refuses_named_pipes_without_waiting(tmp_path: Path) -> None:
    """A pipe for a recipe and one for a scan, by the installed program."""
    os.mkfifo(tmp_path / "pipe")
    code = "from dtype_engine.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", "--recipe", str(tmp_path / "pipe")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == f"dtype-engine: {tmp_path / 'pipe'} is not a regular file\n"


@pytest.mark.parametrize("path", ["x" * 5000, "a/" * 3000 + "x.html", "~nobody-of-this-name/x.md"])
def test_invalid_output_path_is_refused(path: str) -> None:
    with pytest.raises(UserError) as caught:
        check_target(Path(path))
    assert str(caught.value).startswith("can't write ")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("size", ["9" * 400, "9" * 5000 + "GiB", "9" * 400 + "%"])
def test_byte_budget_larger_than_any_model_is_refused(size: str) -> None:
    with pytest.raises(UserError, match="larger than any model"):
        parse_bytes(size, 1000)
