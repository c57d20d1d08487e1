"""Translates a recipe into what a runtime computes with if it quantizes the unquantized checkpoint by that recipe itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dtype_engine.core.errors import UserError
from dtype_engine.recipe.rules import Recipe
from dtype_engine.recipe.targets import SERVING, Context, Conversion, target_named
from dtype_engine.recipe.targets.online import Online


@dataclass(frozen=True, slots=True)
class Served:
    """What a runtime computes with if it serves a recipe from the unquantized checkpoint."""

    runtime: str
    """The name of the runtime, such as "vllm"."""
    recipe: Recipe
    """The recipe with the runtime's values: its scales, and its one dtype for everything that it does not quantize."""
    quantize_activations: Literal["none", "weights"]
    """The run setting with which the inputs of layers are rounded as the runtime rounds them."""
    conversion: Conversion
    """The recipe as the runtime reads it, with what that leaves out."""


def served(context: Context, runtime: str) -> Served:
    """Return what a runtime of `SERVING` computes with if it serves the context's plan. Raises UserError for other runtimes."""
    target = target_named(runtime) if runtime in SERVING else None
    if not isinstance(target, Online):
        raise UserError(f"it is not known what {runtime!r} computes with: use {' or '.join(SERVING)}")
    rounds: Literal["none", "weights"] = "weights" if target.quantizes_activations(context) else "none"
    return Served(runtime, target.served(context), rounds, target.convert(context))
