"""An export of a checkpoint in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dtype_engine import Options, Recipe
from dtype_engine.checkpoint import Checkpoint
from dtype_engine.results.export import ExportReport
from dtype_engine.runtime.export import export, of_checkpoint


def export_checkpoint(
    checkpoint: Checkpoint, title: str, recipe: Recipe, folder: Path, options: Options | None = None, **how: Any
) -> ExportReport:
    """Export a checkpoint under a recipe without loading it. how: the arguments of `export` by name."""
    return export(of_checkpoint(checkpoint, title, recipe, options), folder, **how)
