"""Converts recipes for torchao: an `FqnToConfig` in the part of config.json that transformers reads.

A `re:` pattern must match the full name of a parameter or module. torchao applies all patterns that match a parameter, one after
another. The patterns written here are therefore disjoint: none of them match the same parameter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import Any

from dtype_engine.core import dtypes
from dtype_engine.core.tree import Module
from dtype_engine.recipe.targets.base import (
    Context,
    Conversion,
    Match,
    Target,
    exact_first,
    loading_note,
    matcher,
    split,
    weights_in,
    weights_of,
    wide_inputs_note,
)
from dtype_engine.recipe.targets.name_patterns import regexes

NAME = "torchao"
KINDS = frozenset({"Linear", "Embedding"})
GROUPED = ("int4@g128", "int4@g32", "int8@g128")
"""The formats of torchao's symmetric `IntxWeightOnlyConfig`. Like this program, torchao computes a group's scale as its largest
|value| divided by 7.5 (int4) or 127.5 (int8).
"""
SCALING = {
    f"{element}{rule}": mode
    for element, own in (("mxfp8", "RCEIL"), ("mxfp4", "EVEN"))
    for rule, mode in (("", own), (":floor", "FLOOR"), (":rceil", "RCEIL"), (":even", "EVEN"))
}
"""torchao's `ScaleCalculationMode` for each MX format. A format without a rule in its name has the rule of compressed-tensors. This
rule is EVEN for mxfp4. For mxfp8 it is RCEIL, except for blocks whose largest |value| is 1.75 times a power of two.
"""
BLOCKS = (*SCALING, "nvfp4")
"""The formats in torchao's prototype of block formats. The prototype supports only linear layers, and MX formats only with
quantized activations.
"""
MADE_AS = "0.18"
"""The torchao release whose JSON format is written. A test checks that torchao itself reads and writes the same JSON as this
module.
"""


def convert(context: Context) -> Conversion:
    quantised_inputs = context.activations == "weights"
    parts = split(
        context, NAME, (*dtypes.WHOLE_SCALE_DTYPES, *GROUPED, *BLOCKS), KINDS, also=partial(_refusal, quantised_inputs)
    )
    universe = context.all_names()
    patterns = [
        (f"re:{regex}", dtype)
        for dtype, names in parts.by_dtype().items()
        for regex in regexes(_pattern_names(names, dtype), universe)
    ]
    notes = [loading_note(parts.base), *wide_inputs_note(context, NAME, BLOCKS), *_block_notes(patterns, parts.base)]
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
    return Conversion(
        json.dumps(text, indent=2) + "\n", tuple(patterns), parts.base, parts.losses.result(), tuple(notes)
    )


def _pattern_names(names: Iterable[str], dtype: str) -> list[str]:
    """Return the names with which torchao compares patterns for these weights: the names of the weights or, for NVFP4, of their
    modules (pytorch/ao#3252). dtype: the dtype of all these weights.
    """
    return [name.rpartition(".")[0] if dtype == "nvfp4" else name for name in names]


def _refusal(quantised_inputs: bool, module: Module, dtype: str) -> str | None:
    if dtype in BLOCKS and module.class_name != "Linear":
        return f"{NAME} has {dtypes.short_name(dtype)} for Linear only"
    if dtype in SCALING and not quantised_inputs:
        return f"{NAME} has {dtypes.short_name(dtype)} with quantized activations only (--quantize-activations weights)"
    return None


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
        name = "float8_e4m3fn" if dtype.startswith("mxfp8") else "float4_e2m1fn_x2"
        element = {"_type": "torch.dtype", "_data": name}
        data = {
            "block_size": 32,
            "activation_dtype": element,
            "weight_dtype": element,
            "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"},
            "scaling_mode": {"_type": "ScaleCalculationMode", "_data": SCALING[dtype]},
        }
        return {"_type": "MXDynamicActivationMXWeightConfig", "_version": 1, "_data": data}
    if dtype == "nvfp4" and quantised_inputs:
        data = {"use_triton_kernel": True, "use_dynamic_per_tensor_scale": True, "step": None}
        return {"_type": "NVFP4DynamicActivationNVFP4WeightConfig", "_version": 1, "_data": data}
    if dtype == "nvfp4":
        return {"_type": "NVFP4WeightOnlyConfig", "_version": 1, "_data": {"use_dynamic_per_tensor_scale": True}}
    if row.blocks is not None:
        data = {
            "weight_dtype": {"_type": "torch.dtype", "_data": dtype.partition("@")[0]},
            "granularity": {"_type": "PerGroup", "_version": 1, "_data": {"group_size": row.blocks.columns}},
            "mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"},
            "scale_dtype": None,
            "intx_packing_format": {"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
            "intx_choose_qparams_algorithm": {"_type": "IntxChooseQParamsAlgorithm", "_data": "AFFINE"},
        }
        return {"_type": "IntxWeightOnlyConfig", "_version": 2, "_data": data}
    scale: dict[str, Any] = (
        {"_type": "PerTensor", "_version": 1, "_data": {}}
        if row.per_tensor
        else {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
    )
    if row.torch_name == "int8":
        data = {"group_size": None, "granularity": scale, "set_inductor_config": True}
        return {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": data}
    data = {
        "weight_dtype": {"_type": "torch.dtype", "_data": row.torch_name},
        "set_inductor_config": True,
        "granularity": scale,
    }
    return {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": data}


def match(context: Context, pattern: str) -> Match:
    is_regex = pattern.startswith("re:")
    matches = matcher(pattern[3:], pattern, "fullmatch") if is_regex else pattern.__eq__
    taken = {tensor for module, tensor in weights_of(context, KINDS).items() if matches(module)}
    taken |= {tensor.name for tensor in context.in_scope() for name in tensor.names if matches(name)}
    why = None if taken or is_regex else "without 're:' it is a name, not a pattern"
    return Match(frozenset(taken), why)


TARGET = Target(
    NAME,
    "exact names of modules or parameters, or 're:' and re.fullmatch",
    exact_first,
    convert,
    weights_in(KINDS),
    match,
)
