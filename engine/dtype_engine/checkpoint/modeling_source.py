"""Reads the source code of a transformers architecture without importing it, to learn of its names and float32 tensors."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from dtype_engine.results.coverage import common_prefix

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}
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


def is_known(config: Mapping[str, Any] | None) -> bool:
    """Return whether transformers has the architecture that the content of a config.json names."""
    return bool(_source(_model_type(config)))


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
    """Return the extra prefix that all tensor names in a checkpoint have, and that keeps transformers from finding the tensors. If
    the architecture's own prefix is `model.`, this is `language_model.` in `language_model.model.layers.0`, and `module._orig_mod.`
    in `module._orig_mod.model.layers.0`. Returns "" if there is none, or if the architecture is unknown.

    A common prefix is extra only if the architecture's own prefix follows it in most names. config: the content of config.json.
    """
    known = tuple(f"{prefix}." for prefix in _PREFIX.findall(_source(_model_type(config))) if prefix)
    prefix, rest = "", list(names)
    while known and (more := common_prefix(rest)) and more not in known:
        prefix, rest = prefix + more, [name[len(more) :] for name in rest]
    return prefix if prefix and 2 * sum(name.startswith(known) for name in rest) > len(rest) else ""


def wrappers(names: Collection[str], config: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the parts of tensor names, such as `_orig_mod`, that only wrappers of torch or PEFT add, each with the number of names
    that have it. No class of transformers has such a part. Empty for an unknown architecture, whose code may wrap its modules.
    """
    found = (part for name in names for part in _WRAPPERS & {*name.split(".")}) if is_known(config) else ()
    return dict(Counter(found))
