"""Tells in which format runtimes round the inputs of a layer whose weight another program quantized, as its configuration declares.

Scales are computed from the inputs themselves or, if the files have one scale for all inputs of a layer, are this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import declared, matches, quant_method
from dtype_engine.checkpoint.schemes.encoded_weight import EncodedWeight
from dtype_engine.core.dtypes import PER_TENSOR

_COMPRESSED_TENSORS = {
    (8, "float", "token", None): "float8_e4m3fn", (8, "int", "token", None): "int8", (8, "float", "group", 128): "fp8@128x128",
    (8, "float", "tensor", None): "float8_e4m3fn@tensor", (8, "int", "tensor", None): "int8@tensor",
    (8, "float", "group", 32): "mxfp8", (4, "float", "group", 32): "mxfp4", (4, "float", "tensor_group", 16): "nvfp4",
}  # fmt: skip
"""Maps (bits, type, strategy, group size) of compressed-tensors' `input_activations` to a format of `core.dtypes`."""
_MODELOPT = {
    "modelopt:e4m3@tensor": "float8_e4m3fn@tensor", "modelopt:e4m3@channel": "float8_e4m3fn", "modelopt:mxfp8": "mxfp8",
    "modelopt:nvfp4": "nvfp4",
}  # fmt: skip
_OF_INPUTS = (".input_scale", ".input_global_scale", ".activation_scale")


def input_format(weight: EncodedWeight, config: Mapping[str, Any] | None) -> str:
    """Return the format of `core.dtypes`, such as "int8", to which the inputs of a weight's layer are rounded, or "". If it ends
    with "@tensor", all inputs have the scale in the tensor `input_scale(weight)`. config: the content of config.json.
    """
    found = _declared(weight, declared(config or {}))
    needs_scale = found.endswith(PER_TENSOR) or (weight.scheme, found) == ("modelopt", "nvfp4")
    return "" if needs_scale and input_scale(weight) is None else found


def input_scale(weight: EncodedWeight) -> CheckpointTensor | None:
    """Return the tensor with the scale of all inputs of a weight's layer, or None if the files have none. For NVFP4, it is the
    scale of the scales of blocks, of which compressed-tensors stores the reciprocal.
    """
    return next((part for part in weight.beside if part.name.endswith(_OF_INPUTS) and not part.absent), None)


def _declared(weight: EncodedWeight, settings: Mapping[str, Any]) -> str:
    if weight.scheme == "ct":
        return _of_compressed_tensors(weight.name.rpartition(".")[0], settings)
    if weight.scheme == "modelopt":
        return _MODELOPT.get(weight.format, "")
    if weight.scheme not in ("fp8", "deepseek") or "e4m3" not in weight.format:
        return ""
    if quant_method(settings) == "fbgemm_fp8":
        return "float8_e4m3fn"
    if settings.get("activation_scheme") == "static":
        return "float8_e4m3fn@tensor"
    if settings.get("activation_scheme") != "dynamic":
        return ""
    if weight.settings["block"] == (128, 128):
        return "fp8@128x128:ue8m0" if settings.get("scale_fmt") == "ue8m0" else "fp8@128x128"
    return "float8_e4m3fn" if weight.format.endswith(("@tensor", "@channel")) else ""


def _of_compressed_tensors(module: str, settings: Mapping[str, Any]) -> str:
    """Return the format to which runtimes round the inputs of a module, or "" if they do not. A group of `config_groups` that names
    the module has precedence over groups that name a class. settings: the quantization settings in config.json.
    """
    groups = settings.get("config_groups")
    of_class = ""
    for group in groups.values() if isinstance(groups, Mapping) else ():
        arguments = group.get("input_activations") if isinstance(group, Mapping) else None
        targets = group.get("targets") if isinstance(group, Mapping) else None
        form = _of_arguments(arguments) if isinstance(arguments, Mapping) else ""
        if not isinstance(targets, list):
            continue
        if any(matches(target, module) for target in targets):
            return form
        of_class = of_class or form
    return of_class


def _of_arguments(arguments: Mapping[str, Any]) -> str:
    is_static = arguments.get("strategy") == "tensor"
    if (
        arguments.get("dynamic") not in ((False,) if is_static else (True, "local"))
        or arguments.get("symmetric") is False
    ):
        return ""
    key = tuple(arguments.get(name) for name in ("num_bits", "type", "strategy", "group_size"))
    return next((form for wanted, form in _COMPRESSED_TENSORS.items() if wanted == key), "")
