"""Tells in which format runtimes round the inputs of a layer whose weight another program quantized, as its configuration declares.

Only formats whose scales are computed from the inputs themselves are known here. NVFP4's scale of the whole tensor is
also computed from the inputs, although the file has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtype_engine.checkpoint.schemes.configuration import declared, matches, quant_method
from dtype_engine.checkpoint.schemes.encoded_weight import EncodedWeight

_COMPRESSED_TENSORS = {
    (8, "float", "token", None): "float8_e4m3fn", (8, "int", "token", None): "int8", (8, "float", "group", 128): "fp8@128x128",
    (8, "float", "group", 32): "mxfp8", (4, "float", "group", 32): "mxfp4", (4, "float", "tensor_group", 16): "nvfp4",
}  # fmt: skip
"""Maps (bits, type, strategy, group size) of compressed-tensors' `input_activations` to a format of `core.dtypes`."""
_MODELOPT = {"modelopt:e4m3@channel": "float8_e4m3fn", "modelopt:mxfp8": "mxfp8", "modelopt:nvfp4": "nvfp4"}


def input_format(weight: EncodedWeight, config: Mapping[str, Any] | None) -> str:
    """Return the format, a name in `core.dtypes` such as "int8", to which runtimes round the inputs of a weight's layer. Returns ""
    if they do not round them. config: the content of config.json.
    """
    settings = declared(config or {})
    if weight.scheme == "ct":
        return _of_compressed_tensors(weight.name.rpartition(".")[0], settings)
    if weight.scheme == "modelopt":
        is_rounded = weight.format != "modelopt:nvfp4" or any("input_scale" in part.name for part in weight.beside)
        return _MODELOPT.get(weight.format, "") if is_rounded else ""
    if weight.scheme not in ("fp8", "deepseek") or "e4m3" not in weight.format:
        return ""
    if quant_method(settings) == "fbgemm_fp8":
        return "float8_e4m3fn"
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
    if arguments.get("dynamic") not in (True, "local") or arguments.get("symmetric") is False:
        return ""
    key = tuple(arguments.get(name) for name in ("num_bits", "type", "strategy", "group_size"))
    return next((form for wanted, form in _COMPRESSED_TENSORS.items() if wanted == key), "")
