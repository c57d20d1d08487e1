"""Converts recipes for NVIDIA ModelOpt: the `quant_cfg` list for `mtq.quantize`.

ModelOpt adds quantizers below every module that it can quantize (`...q_proj.weight_quantizer`). Entries of the list match the
quantizers' names by `fnmatch`, and the last match wins. Our list first disables all quantizers and then enables those of weights
that the plan quantizes.

`block_sizes` gives a block size per dimension (as in ModelOpt's `NVFP4_DEFAULT_CFG`, `MXFP8_DEFAULT_CFG`,
`INT4_BLOCKWISE_WEIGHT_ONLY_CFG`, `FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG`). Its keys are integers, unlike JSON's.
"""

from __future__ import annotations

import fnmatch
import json
import re
from typing import Any

from dtype_engine.core import dtypes
from dtype_engine.recipe.kv_serving import modelopt_layers
from dtype_engine.recipe.targets.base import Context, Conversion, Match, Quantizer
from dtype_engine.recipe.targets.name_patterns import globs

_QUANTIZERS = ("weight_quantizer", "input_quantizer", "output_quantizer")


class ModelOpt(Quantizer):
    name = title = "modelopt"
    matcher = "fnmatch on quantizer names"
    precedence = "last"
    writes_caches = True
    kinds = frozenset({"Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding"})
    formats = (
        "float8_e4m3fn", "float8_e4m3fn@tensor", "int8", "int8@tensor", "nvfp4", "fp8@128x128", "int4@g128", "int4@g32",
        "int8@g128", *(name for name in dtypes.STORED_FORMATS if name.startswith(("mxfp4", "mxfp8"))),
    )  # fmt: skip

    def write(self, context: Context) -> Conversion:
        parts = self.split(context)
        # The tree does not say which modules get quantizers, so the patterns are exact among the quantizers of all modules.
        universe = [f"{module}.{quantizer}" for module in context.tree.modules if module for quantizer in _QUANTIZERS]
        entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
        patterns: list[tuple[str, str]] = []
        for dtype, names in parts.by_dtype().items():
            config = _config(dtype)
            if (other := _other_scales(dtype)) is not None:
                for name in names:
                    parts.losses.add(name, dtype, *other, "scale")
            for pattern in globs((f"{name.rpartition('.')[0]}.weight_quantizer" for name in names), universe):
                patterns.append((pattern, dtype))
                entries.append({"quantizer_name": pattern, "cfg": config, "enable": True})
        layers, left = modelopt_layers(context.tree, context.plan.caches)
        for module, of_module in layers.items():
            for part, algorithm in zip(
                "kv", of_module["quant_algo"].replace("_K_", " ").removesuffix("_V").split() * 2, strict=False
            ):
                config = _config("nvfp4" if algorithm == "NVFP4" else "float8_e4m3fn@tensor")
                entries.append({"quantizer_name": f"{module}.{part}_bmm_quantizer", "cfg": config, "enable": True})
        for name in left:
            parts.losses.add(name, context.plan.caches[name], dtypes.STORED, "ModelOpt has KV caches in FP8 and NVFP4")
        text = json.dumps({"quant_cfg": entries, "algorithm": "max"}, indent=2) + "\n"
        notes = (
            parts.loading_note(),
            "pass it to modelopt.torch.quantization.quantize(model, json.load(file, object_hook=hook)), where hook = lambda entry: "
            "{int(key) if key.lstrip('-').isdigit() else key: value for key, value in entry.items()}; weights are packed on export",
            *self.wide_inputs_note(context),
            *((f"ModelOpt exports KV caches as kv_cache_quantized_layers: {json.dumps(layers)}",) if layers else ()),
        )
        return Conversion(text, tuple(patterns), parts.base, parts.losses.result(), notes)

    def match(self, context: Context, pattern: str) -> Match:
        if pattern.startswith(("re:", "type:")):
            return Match(problem="patterns are globs; regular expressions and classes are not supported")
        matches = re.compile(fnmatch.translate(pattern)).match
        weights = self.weights(context)
        taken = frozenset(tensor for module, tensor in weights.items() if matches(f"{module}.weight_quantizer"))
        return Match(taken, None if taken else "it must match the quantizer's name, which ends in .weight_quantizer")


def _config(dtype: str) -> dict[str, Any]:
    row = dtypes.BY_NAME[dtype]
    bits: int | list[int] = row.bits if row.kind == "int" else [row.exponent, row.mantissa]
    blocks = row.blocks
    if blocks is None:
        return {"num_bits": bits, "axis": None if row.per_tensor else 0}
    sizes: dict[str, Any] = {"-1": blocks.columns}
    if blocks.rows > 1:
        sizes["-2"] = blocks.rows
    elif row.kind == "float":
        sizes |= {"type": "dynamic", "scale_bits": [4, 3] if blocks.tensor_scale else [8, 0]}
    return {"num_bits": bits, "block_sizes": sizes}


def _other_scales(dtype: str) -> tuple[str, str] | None:
    """Return None if ModelOpt uses the plan's scales for `dtype`, otherwise (the dtype that it uses, how its scales differ)."""
    row = dtypes.BY_NAME[dtype]
    if row.blocks is None:
        return None
    if row.kind == "int":
        return dtype, f"ModelOpt's scales are amax / {row.max:g}, in float32"
    if row.blocks.rule not in ("amax", "rceil"):
        return dtype.partition(":")[0] + ":rceil", "ModelOpt rounds the exponent up"
    if row.blocks.tensor_scale:
        return dtype, "ModelOpt shares the scale of fused layers only when it exports"
    return None


TARGET = ModelOpt()
