"""Recipes in the words of other tools.

What is written is computed from the plan over a model's tensors, not from the rules: exact, anchored and disjoint, so that
it can't matter which of several patterns a tool prefers. What a tool can't express is listed.
"""

from __future__ import annotations

from importlib import import_module

from dtype_engine.core.errors import UserError
from dtype_engine.recipe.targets.base import Context, Conversion, Match, Target, Unsupported

TARGET_SUFFIXES = {
    "torchao": ".json",
    "llama.cpp": ".txt",
    "diffusers": ".py",
    "llm-compressor": ".yaml",
    "transformers": ".py",
    "modelopt": ".json",
    "comfyui": ".json",
}
"""Every target, and what kind of file its tool reads. The module of this package with its name is imported when it is asked for."""


def target_named(name: str) -> Target:
    """The target of this name. Raises UserError."""
    if name not in TARGET_SUFFIXES:
        raise UserError(f"unknown target {name!r}: use one of {', '.join(TARGET_SUFFIXES)}")
    target: Target = import_module(f"{__name__}.{name.replace('-', '_').replace('.', '_')}").TARGET
    return target


__all__ = [
    "TARGET_SUFFIXES",
    "Context",
    "Conversion",
    "Match",
    "Target",
    "Unsupported",
    "target_named",
]
