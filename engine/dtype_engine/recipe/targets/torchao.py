"""Converts recipes for torchao: an `FqnToConfig` in the part of config.json that transformers reads.

A `re:` pattern must match the full name of a parameter or module. torchao applies all patterns that match a parameter, one after
another. The patterns written here are therefore disjoint: none of them match the same parameter.
"""

from __future__ import annotations

import json
from typing import Any

from dtype_engine.core import dtypes
from dtype_engine.core.tree import TensorInfo
from dtype_engine.recipe.targets.base import Context, Conversion, Match, Quantizer, tool_regex
from dtype_engine.recipe.targets.name_patterns import regexes

GROUPED = ("int4@g128", "int4@g32", "int8@g128")
"""The formats of `IntxWeightOnlyConfig`. As here, a group's scale is its largest |value| divided by 7.5 (int4) or 127.5 (int8)."""
SCALING = {
    f"{element}{rule}": mode
    for element, own in (("mxfp8", "RCEIL"), ("mxfp4", "EVEN"))
    for rule, mode in (("", own), (":floor", "FLOOR"), (":rceil", "RCEIL"), (":even", "EVEN"))
}
"""torchao's `ScaleCalculationMode` for each MX format. A format without a rule in its name has the rule of compressed-tensors: EVEN
for mxfp4; for mxfp8 RCEIL, except for blocks whose largest |value| is 1.75 times a power of two.
"""
_WHOLE = tuple(name for name in dtypes.WHOLE_SCALE_DTYPES if dtypes.BY_NAME[name].scales in ("channel", "tensor"))
BLOCKS = (*SCALING, "nvfp4")
"""The formats in torchao's prototype of block formats, which has MX formats only with quantized activations."""
MADE_AS = "0.18"
"""The torchao release whose JSON format is written."""


class Torchao(Quantizer):
    name = title = "torchao"
    matcher = "exact names of modules or parameters, or 're:' and re.fullmatch"
    precedence = "exact first"
    kinds = frozenset({"Linear", "Embedding"})
    formats = (*_WHOLE, *GROUPED, *BLOCKS)

    def write(self, context: Context) -> Conversion:
        quantised_inputs = context.activations == "weights"
        parts = self.split(context)
        universe = context.all_names()
        patterns = [
            (f"re:{regex}", dtype)
            for dtype, names in parts.by_dtype().items()
            # torchao compares patterns with the names of weights or, for NVFP4, of their modules (pytorch/ao#3252).
            for regex in regexes([name.rpartition(".")[0] for name in names] if dtype == "nvfp4" else names, universe)
        ]
        notes = [parts.loading_note(), *self.wide_inputs_note(context, BLOCKS), *_block_notes(patterns, parts.base)]
        notes.append(f"this is the form that torchao {MADE_AS} writes")
        configs = {pattern: _config(dtype, quantised_inputs) for pattern, dtype in patterns}
        # Without the last entry, transformers would skip the output head.
        text = {
            "dtype": parts.base,
            "quantization_config": {
                "quant_method": "torchao",
                "quant_type": {
                    "default": {
                        "_type": "FqnToConfig",
                        "_version": 1,
                        "_data": {"fqn_to_config": configs, "module_fqn_to_config": configs},
                    }
                },
                "modules_to_not_convert": None,
                "include_input_output_embeddings": True,
            },
        }
        written = json.dumps(text, indent=2) + "\n"
        return Conversion(written, tuple(patterns), parts.base, parts.losses.result(), tuple(notes))

    def refusal(self, context: Context, tensor: TensorInfo, dtype: str) -> str | None:
        if why := super().refusal(context, tensor, dtype):
            return why
        if dtype in BLOCKS and context.module_of(tensor.name).class_name != "Linear":
            return f"torchao has {dtypes.short_name(dtype)} for Linear only"
        if dtype in SCALING and context.activations != "weights":
            return f"torchao has {dtypes.short_name(dtype)} with quantized activations only (--quantize-activations weights)"
        return None

    def match(self, context: Context, pattern: str) -> Match:
        is_regex = pattern.startswith("re:")
        matches = tool_regex(pattern[3:], pattern, "fullmatch") if is_regex else pattern.__eq__
        taken = {tensor for module, tensor in self.weights(context).items() if matches(module)}
        taken |= {tensor.name for tensor in context.in_scope() for name in tensor.names if matches(name)}
        why = None if taken or is_regex else "without 're:' it is a name, not a pattern"
        return Match(frozenset(taken), why)


def _block_notes(patterns: list[tuple[str, str]], base: str) -> list[str]:
    written = {dtype for _, dtype in patterns}
    notes = []
    if written.intersection(BLOCKS):
        notes.append("torchao's block formats are a prototype, torchao.prototype.mx_formats")
    if written.intersection(SCALING) and base != "bfloat16":
        notes.append(f"torchao supports MX formats only in bfloat16 models, but this model is loaded in {base}")
    if "nvfp4" in written:
        notes.append(
            "torchao gives each weight in nvfp4 its own tensor scale, but weights that are fused (q/k/v, gate/up) share one here"
        )
    if "mxfp8" in written:
        notes.append(
            "mxfp8 is written as RCEIL: if a block's largest |value| is exactly 1.75 times a power of two, torchao halves its scale"
        )
    return notes


def _config(dtype: str, quantised_inputs: bool) -> dict[str, Any]:
    row = dtypes.BY_NAME[dtype]
    if dtype in SCALING:
        element = _typed("torch.dtype", "float8_e4m3fn" if dtype.startswith("mxfp8") else "float4_e2m1fn_x2")
        data = {
            "block_size": 32,
            "activation_dtype": element,
            "weight_dtype": element,
            "kernel_preference": _typed("KernelPreference", "AUTO"),
            "scaling_mode": _typed("ScaleCalculationMode", SCALING[dtype]),
        }
        return _typed("MXDynamicActivationMXWeightConfig", data, 1)
    if dtype == "nvfp4" and quantised_inputs:
        data = {"use_triton_kernel": True, "use_dynamic_per_tensor_scale": True, "step": None}
        return _typed("NVFP4DynamicActivationNVFP4WeightConfig", data, 1)
    if dtype == "nvfp4":
        return _typed("NVFP4WeightOnlyConfig", {"use_dynamic_per_tensor_scale": True}, 1)
    if row.blocks is not None:
        data = {
            "weight_dtype": _typed("torch.dtype", dtype.partition("@")[0]),
            "granularity": _typed("PerGroup", {"group_size": row.blocks.columns}, 1),
            "mapping_type": _typed("MappingType", "SYMMETRIC"),
            "scale_dtype": None,
            "intx_packing_format": _typed("IntxPackingFormat", "UNPACKED_TO_INT8"),
            "intx_choose_qparams_algorithm": _typed("IntxChooseQParamsAlgorithm", "AFFINE"),
        }
        return _typed("IntxWeightOnlyConfig", data, 2)
    scale = _typed("PerTensor", {}, 1) if row.per_tensor else _typed("PerRow", {"dim": -1}, 1)
    if row.torch_name == "int8":
        data = {"group_size": None, "granularity": scale, "set_inductor_config": True}
        return _typed("Int8WeightOnlyConfig", data, 2)
    weight = _typed("torch.dtype", row.torch_name)
    return _typed(
        "Float8WeightOnlyConfig", {"weight_dtype": weight, "set_inductor_config": True, "granularity": scale}, 2
    )


def _typed(kind: str, data: object, version: int | None = None) -> dict[str, Any]:
    return {"_type": kind, **({} if version is None else {"_version": version}), "_data": data}


TARGET = Torchao()
