"""Converts recipes to the formats of other tools.

The patterns in a converted recipe are computed from the planned dtype of each tensor, not from the rules. No two patterns match the
same tensor, so a tool's order of precedence does not matter. Tensors whose dtype a tool can't express are listed.
"""

from __future__ import annotations

from importlib import import_module

from dtype_engine.core.errors import UserError
from dtype_engine.recipe.targets.base import Context, Conversion, Target

TARGET_SUFFIXES = {
    "torchao": ".json",
    "llama.cpp": ".txt",
    "diffusers": ".py",
    "llm-compressor": ".yaml",
    "transformers": ".py",
    "modelopt": ".json",
    "comfyui": ".json",
    "vllm": ".json",
    "sglang": ".sh",
}
"""The name of every target, and the extension of the file that the tool reads. A target's module is imported only when used."""

SERVING = ("vllm", "sglang")
"""The targets that are runtimes, which quantize a checkpoint while they load it."""


def target_named(name: str) -> Target:
    """Return the target with this name, such as "torchao". Raises UserError for an unknown name."""
    if name not in TARGET_SUFFIXES:
        raise UserError(f"unknown target {name!r}: use one of {', '.join(TARGET_SUFFIXES)}")
    target: Target = import_module(f"{__name__}.{name.replace('-', '_').replace('.', '_')}").TARGET
    return target


__all__ = ["SERVING", "TARGET_SUFFIXES", "Context", "Conversion", "target_named"]
