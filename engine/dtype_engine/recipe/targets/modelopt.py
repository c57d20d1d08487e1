"""NVIDIA ModelOpt: the `quant_cfg` list for `mtq.quantize`.

Every module it can quantise gets quantizers below it (`...q_proj.weight_quantizer`); entries name them by `fnmatch`, and
the last that matches wins. All are turned off first, then the planned weights are turned on.
"""

from __future__ import annotations

import fnmatch
import json
import re
from typing import Any

from dtype_engine.core import dtypes
from dtype_engine.recipe.targets.base import (
    Context,
    Conversion,
    Match,
    Target,
    last,
    loading_note,
    split,
    weights_in,
    weights_of,
)
from dtype_engine.recipe.targets.name_patterns import globs

NAME = "modelopt"
KINDS = frozenset({"Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding"})
FORMATS = ("float8_e4m3fn", "float8_e4m3fn@tensor", "int8", "int8@tensor")
QUANTIZERS = ("weight_quantizer", "input_quantizer", "output_quantizer")


def convert(context: Context) -> Conversion:
    parts = split(context, NAME, FORMATS, KINDS)
    # Any module could have quantizers as far as the tree tells, so the patterns are exact among all of them.
    universe = [f"{module}.{quantizer}" for module in context.tree.modules if module for quantizer in QUANTIZERS]
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    patterns: list[tuple[str, str]] = []
    for dtype, names in parts.by_dtype().items():
        row = dtypes.info(dtype)
        bits: int | list[int] = 8 if row.kind == "int" else [row.exponent, row.mantissa]
        for pattern in globs((f"{name.rpartition('.')[0]}.weight_quantizer" for name in names), universe):
            patterns.append((pattern, dtype))
            config = {"num_bits": bits, "axis": None if row.per_tensor else 0}
            entries.append({"quantizer_name": pattern, "cfg": config, "enable": True})
    text = json.dumps({"quant_cfg": entries, "algorithm": "max"}, indent=2) + "\n"
    notes = (
        loading_note(parts.base),
        "pass it to modelopt.torch.quantization.quantize(model, json.load(file)); weights are packed on export",
    )
    return Conversion(NAME, text, tuple(patterns), parts.base, parts.losses.result(), notes)


def match(context: Context, pattern: str) -> Match:
    if pattern.startswith(("re:", "type:")):
        return Match(frozenset(), "patterns are globs; expressions and classes are not known")
    matches = re.compile(fnmatch.translate(pattern)).match
    weights = weights_of(context, KINDS)
    taken = frozenset(tensor for module, tensor in weights.items() if matches(f"{module}.weight_quantizer"))
    return Match(taken, None if taken else "it must match the quantizer's name, which ends in .weight_quantizer")


TARGET = Target(NAME, "fnmatch on quantizer names", last, convert, weights_in(KINDS), match)
