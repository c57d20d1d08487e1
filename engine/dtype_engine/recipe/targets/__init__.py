"""Recipes in the words of other tools.

What is written is computed from the plan over a model's tensors, not from the rules: exact, anchored and disjoint, so that
it can't matter which of several patterns a tool precedence. What a tool can't express is listed.
"""

from __future__ import annotations

from dtype_engine.core.errors import UserError
from dtype_engine.recipe.targets import (
    comfyui,
    diffusers,
    hf_transformers,
    llama_cpp,
    llm_compressor,
    modelopt,
    torchao,
)
from dtype_engine.recipe.targets.base import (
    Context,
    Conversion,
    Match,
    Target,
    Unsupported,
    left_out_as_json,
)

RECIPE_TARGETS: dict[str, Target] = {
    module.TARGET.name: module.TARGET
    for module in (torchao, llama_cpp, diffusers, llm_compressor, hf_transformers, modelopt, comfyui)
}


def target_named(name: str) -> Target:
    """The target of this name. Raises UserError."""
    try:
        return RECIPE_TARGETS[name]
    except KeyError:
        raise UserError(f"unknown target {name!r}: use one of {', '.join(RECIPE_TARGETS)}") from None


__all__ = [
    "RECIPE_TARGETS",
    "Context",
    "Conversion",
    "Match",
    "Target",
    "Unsupported",
    "left_out_as_json",
    "target_named",
]
