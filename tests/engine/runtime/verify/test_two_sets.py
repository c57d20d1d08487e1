"""An export in which a tensor lies twice is no verified export: loaders differ in which of the two they read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dtype_engine.cli import cli
from dtype_engine.cli.program import run


def test_second_set_of_weights_in_an_export_is_a_difference(
    make_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = make_llama(), tmp_path / "out"
    assert run(cli, "dtype-engine", ["export", str(source), "--cast", "*=bf16", "-o", str(out)]) == 0
    assert run(cli, "dtype-engine", ["verify", str(out), "--against", str(source)]) == 0
    shutil.copy(out / "model.safetensors", out / "model-00001-of-00001.safetensors")
    capsys.readouterr()
    assert run(cli, "dtype-engine", ["verify", str(out), "--against", str(source)]) == 1
    said = capsys.readouterr().out
    assert "is in model-00001-of-00001.safetensors and again in model.safetensors" in said
