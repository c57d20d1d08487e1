"""Recipes in the words of other tools.

What is written is computed from the plan over a model's tensors, not from the rules: exact, anchored and disjoint, so that
it can't matter which of several patterns a tool prefers. What a tool can't express is listed.
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
    Converted,
    Dialect,
    LeftOut,
    Taken,
    left_out_as_json,
)

DIALECTS: dict[str, Dialect] = {
    module.DIALECT.name: module.DIALECT
    for module in (torchao, llama_cpp, diffusers, llm_compressor, hf_transformers, modelopt, comfyui)
}


def dialect(name: str) -> Dialect:
    """The target of this name. Raises UserError."""
    try:
        return DIALECTS[name]
    except KeyError:
        raise UserError(f"unknown target {name!r}: use one of {', '.join(DIALECTS)}") from None


__all__ = ["DIALECTS", "Context", "Converted", "Dialect", "LeftOut", "Taken", "dialect", "left_out_as_json"]
