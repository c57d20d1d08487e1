"""Reads the source code of a transformers architecture without importing it, to learn of its names and float32 tensors."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from dtype_engine.results.coverage import common_prefix

_PREFIX = re.compile(r"^    base_model_prefix = [\"']([\w.]*)[\"']", re.MULTILINE)
_KEPT = re.compile(r"^    _keep_in_fp32_modules(_strict)? = (\[[^\]]*\]|\{[^}]*\})", re.MULTILINE)


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


def kept_in_float32(config: Mapping[str, Any] | None) -> tuple[set[str], set[str]]:
    """Return two sets of words, which are parts of dotted names. Tensors with a word of the first set in their name stay in float32
    in every 16-bit model, tensors with a word of the second set only in a float16 model.
    """
    always, in_float16 = set[str](), set[str]()
    for strict, literal in _KEPT.findall(_source(_model_type(config))):
        with suppress(ValueError, SyntaxError):
            (always if strict else in_float16).update(
                word for word in ast.literal_eval(literal) if isinstance(word, str)
            )
    return always, in_float16


def foreign_prefix(names: Collection[str], config: Mapping[str, Any] | None) -> str:
    """Return the extra prefix of all tensor names in a checkpoint, because of which transformers does not find the tensors, such as
    `language_model.` in `language_model.model.layers.0` if the architecture's own prefix is `model.`. Returns "" if there is none,
    or if the architecture is unknown.

    A common prefix is extra only if the architecture's own prefix follows it in most names. config: the content of config.json.
    """
    known = tuple(f"{prefix}." for prefix in _PREFIX.findall(_source(_model_type(config))) if prefix)
    prefix = common_prefix(list(names))
    if not known or not prefix or prefix in known:
        return ""
    return prefix if 2 * sum(name.startswith(known, len(prefix)) for name in names) > len(names) else ""
