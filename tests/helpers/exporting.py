"""Exports in one call, and what is in their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dtype_engine import Options, Recipe
from dtype_engine.checkpoint import Checkpoint
from dtype_engine.cli import cli, run
from dtype_engine.results.export import ExportReport
from dtype_engine.runtime.export import export, of_checkpoint


def export_checkpoint(
    checkpoint: Checkpoint, title: str, recipe: Recipe, folder: Path, options: Options | None = None, **how: Any
) -> ExportReport:
    """Export a checkpoint under a recipe without loading it. how: the arguments of `export` by name."""
    return export(of_checkpoint(checkpoint, title, recipe, options), folder, **how)


def engine(*arguments: object) -> int:
    """Run `dtype-engine` with these arguments; its exit status."""
    return run(cli, "dtype-engine", [str(argument) for argument in arguments])


def read(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata of a file, as safetensors reads them."""
    with safe_open(file, framework="pt") as opened:
        return load_file(file), opened.metadata()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = [tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*bits)
