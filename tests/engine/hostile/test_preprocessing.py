"""With a damaged tokenizer or processor, a model is opened nevertheless, and the command line prints one sentence."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import checkpoint_folders
from tests.helpers.panicking_tokenizer import PANICS, with_panicking_tokenizer

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import BAD_INPUT, run
from dtype_engine.core.foreign_code import failures_as
from dtype_engine.runtime.libraries.silence_libraries import without_panic_message


@pytest.mark.parametrize("kind", PANICS)
def test_tokenizer_panic_is_reported_in_one_line(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The message of the panic goes to the file descriptor 2, so the test captures this descriptor."""
    command = ["drift", str(with_panicking_tokenizer(kind, tmp_path / "model")), "--cast", "*=bf16"]
    assert run(cli, "dtype-engine", command) == 0
    said = capfd.readouterr()
    assert "random token ids (4 x 128): the folder has a tokenizer that is damaged" in said.out
    assert said.err == ""
    assert run(cli, "dtype-engine", [*command, "--prompt", "hello"]) == BAD_INPUT
    said = capfd.readouterr()
    assert said.out == ""
    limited = kind == "a damaged precompiled normaliser"  # it was tried in another process first
    why = "model: its tokenizer.json makes the process that runs it fail" if limited else "a library panicked:"
    assert said.err.startswith(f"dtype-engine: model has a tokenizer that is damaged or can't be loaded ({why}")
    assert said.err.count("\n") == 1


def test_prompt_that_makes_the_tokenizer_panic_is_refused(tmp_path: Path) -> None:
    """The tokenizer works for the first of the built-in prompts."""
    folder = with_panicking_tokenizer("a bad prepend", tmp_path / "model")
    settings = json.loads((folder / "tokenizer.json").read_text())
    shortened = {"type": "Replace", "pattern": {"Regex": "^import"}, "content": "i "}
    settings["normalizer"] = {"type": "Sequence", "normalizers": [shortened, settings["normalizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    session = de.open(str(folder))
    assert session.no_forward is None  # on token ids at random
    fails = "damaged or can't be loaded .model: its tokenizer.json makes the process that runs it fail"
    with pytest.raises(de.UserError, match=fails):
        de.open(str(folder), options=de.Options(prompts=("hello",)))


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("vit", {"image_mean": [0.5] * 7}, "the image processor of vit refuses the picture: "),
        (
            "wav2vec2",
            {"sampling_rate": "x"},
            "wav2vec2: no forward pass: sampling_rate in preprocessor_config.json is 'x'",
        ),
        ("wav2vec2", {"sampling_rate": [1]}, "wav2vec2: its inputs can't be made: TypeError: "),
    ],
)
def test_damaged_processor_is_given_as_the_reason_for_missing_inputs(
    name: str, change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    folder = checkpoint_folders.save(name, tmp_path / name)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    session = de.open(str(folder))
    assert str(session.no_forward).startswith(why)
    session.cast("*", "bfloat16")


def test_failing_chat_template_is_reported(tmp_path: Path) -> None:
    folder = checkpoint_folders.save("llama", tmp_path / "llama")
    (folder / "chat_template.jinja").write_text("{{ messages.nothing.at_all }}")
    with pytest.raises(de.UserError, match="the chat template of llama refuses this conversation"):
        de.open(str(folder), options=de.Options(chat=True, prompts=("hello",)))


class Panic(BaseException):
    """Stands for the PanicException of pyo3, which no library exports."""


@pytest.mark.parametrize("raised", [ValueError("no"), Panic("no"), SystemExit("no"), MemoryError(), RecursionError()])
def test_errors_of_libraries_become_a_user_error_of_one_sentence(raised: BaseException) -> None:
    with pytest.raises(de.UserError, match=r"^file: "), failures_as(de.UserError, "file"):
        raise raised


@pytest.mark.parametrize("ours", [KeyboardInterrupt(), GeneratorExit(), de.Cancelled(), de.NoForward("as it is")])
def test_own_errors_are_not_wrapped(ours: BaseException) -> None:
    with pytest.raises(type(ours)) as caught, failures_as(de.UserError, "file"):
        raise ours
    assert caught.value is ours


def test_standard_error_is_dropped_only_if_the_block_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with without_panic_message(), without_panic_message():
        os.write(2, b"a warning\n")
    with contextlib.suppress(Panic), without_panic_message():
        os.write(2, b"thread panicked\n")
        raise Panic
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "a warning\nafter\n"
