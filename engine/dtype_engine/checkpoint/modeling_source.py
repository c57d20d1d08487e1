"""Reads the source code of a transformers architecture without importing it, to learn which tensors it keeps in float32, and which
prefix it expects in tensor names.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dtype_engine.results.coverage import common_prefix

_PREFIX = re.compile(r"^    base_model_prefix = [\"']([\w.]*)[\"']", re.MULTILINE)
_KEPT = re.compile(r"^    _keep_in_fp32_modules(_strict)? = (\[[^\]]*\]|\{[^}]*\})", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KeptInFloat32:
    """Which tensors an architecture keeps in float32: those whose names contain one of the given parts."""

    always: frozenset[str] = frozenset()
    """Name parts of tensors that stay in float32 if a model is loaded in bfloat16 or float16 (`_keep_in_fp32_modules_strict`)."""
    in_float16: frozenset[str] = frozenset()
    """Name parts of tensors that stay in float32 if a model is loaded in float16 (`_keep_in_fp32_modules`)."""


@cache
def _source(model_type: str) -> str:
    if not model_type.replace("-", "_").isidentifier():
        return ""
    spec = importlib.util.find_spec("transformers")
    text = ""
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = Path(place) / "models" / model_type.replace("-", "_")
        for file in sorted(folder.glob("modeling_*.py")):
            text += file.read_text(encoding="utf-8", errors="replace")
    return text


def _model_type(config: Mapping[str, Any] | None) -> str:
    model_type = (config or {}).get("model_type")
    return model_type if isinstance(model_type, str) else ""


def kept_in_float32(config: Mapping[str, Any] | None) -> KeptInFloat32:
    """Return which tensors an architecture keeps in float32, according to any of its model classes in transformers. The result
    names no tensors if the architecture is unknown. config: the content of config.json, which names the architecture.
    """
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for strict, literal in _KEPT.findall(_source(_model_type(config))):
        try:
            found[bool(strict)].update(word for word in ast.literal_eval(literal) if isinstance(word, str))
        except (ValueError, SyntaxError):
            continue
    return KeptInFloat32(frozenset(found[True]), frozenset(found[False]))


def foreign_prefix(names: Collection[str], config: Mapping[str, Any] | None) -> str:
    """Return the extra prefix with which all tensor names in a checkpoint begin. Because of such a prefix, transformers does not
    find the tensors. Returns "" if there is none, or if the architecture is unknown.

    For example, the prefix is `language_model.` in `language_model.model.layers.0`, if the architecture's own prefix is `model.`. A
    common prefix is extra only if the architecture's own prefix follows it in most names. config: the content of config.json, which
    names the architecture.
    """
    known = tuple(f"{prefix}." for prefix in _PREFIX.findall(_source(_model_type(config))) if prefix)
    prefix = common_prefix(list(names))
    if not known or not prefix or prefix in known:
        return ""
    return prefix if 2 * sum(name.startswith(known, len(prefix)) for name in names) > len(names) else ""
