"""KV caches as the transformers that is installed names them: `cache` from 5.24 on, `past_key_values` or `cache_params` before."""

from __future__ import annotations

import inspect
from typing import Any

NAMES = ("cache", "past_key_values", "cache_params")


def cache_argument(module: Any) -> str:
    """The name of the argument by which a model takes its cache."""
    return next(name for name in NAMES if name in inspect.signature(module.forward).parameters)


def cache_of(output: Any) -> Any:
    """The cache in a model's output, or None."""
    return next((vars(output)[name] for name in NAMES if vars(output).get(name) is not None), None)
