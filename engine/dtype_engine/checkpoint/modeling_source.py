"""What the source text of an architecture in transformers declares, read without importing it."""

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
    """Parts of names whose tensors an architecture keeps in float32."""

    always: frozenset[str] = frozenset()
    """Parts that stay in float32 in a model that is loaded in bfloat16 or float16 (`_keep_in_fp32_modules_strict`)."""
    in_float16: frozenset[str] = frozenset()
    """Parts that stay in float32 in a model that is loaded in float16 (`_keep_in_fp32_modules`)."""


@cache
def _source(model_type: str) -> str:
    """The text of the modeling files of an architecture; "" where this transformers has none, or is not installed."""
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
    """What the classes of the architecture declare, all together; nothing where it is not known."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for strict, literal in _KEPT.findall(_source(_model_type(config))):
        try:
            found[bool(strict)].update(word for word in ast.literal_eval(literal) if isinstance(word, str))
        except (ValueError, SyntaxError):
            continue
    return KeptInFloat32(frozenset(found[True]), frozenset(found[False]))


def foreign_prefix(names: Collection[str], config: Mapping[str, Any] | None) -> str:
    """What stands before all names of a checkpoint and not before those of its architecture, as in `language_model.`; "" where
    nothing does, or the architecture is not known.

    Its own prefix has to follow in most of the names: loaders add and drop that one, and no other.
    """
    known = tuple(f"{prefix}." for prefix in _PREFIX.findall(_source(_model_type(config))) if prefix)
    prefix = common_prefix(list(names))
    if not known or not prefix or prefix in known:
        return ""
    return prefix if 2 * sum(name.startswith(known, len(prefix)) for name in names) > len(names) else ""
