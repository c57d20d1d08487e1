"""Weights quantized by NVIDIA ModelOpt. The setting `quant_algo` names the algorithm of all layers, or `quantized_layers` that of
each. These settings are in config.json and, more completely, in hf_quant_config.json.

For a layer `x`, `x.weight` holds codes, and `x.weight_scale` holds the scales of their blocks. These scales are multiplied by the
single number in `x.weight_scale_2`. `x.pre_quant_scale` holds a factor for each input of the layer. The layer multiplies its inputs
by these factors; here, the columns of the weight are multiplied by them instead.

With NVFP4_SVD (SVDQuant), two further tensors hold matrices b [out, rank] and a [rank, in]. Their product is added to the
dequantized weight, before `x.pre_quant_scale` is applied (`modelopt.torch.quantization`, `SVDQuantLinear.forward`). In models of
diffusers they are `x.svdquant_lora_a` and `_b`, in those of transformers `x.weight_quantizer._svdquant_lora_a` and `_b`. Layers
without them are in plain NVFP4.

Experts that are stacked in one tensor are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import Targets, declared, mapping, refuse_many_entries, size
from dtype_engine.checkpoint.schemes.layout import LOW_RANK, Config, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import EXPONENTS, FLOATS, FP8, describe, with_beside
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Metadata, Scheme, Weights
from dtype_engine.checkpoint.weight_files import read_json

_BESIDE_CONFIG = "hf_quant_config.json"
_INPUTS = {
    "modelopt:e4m3@tensor": "float8_e4m3fn@tensor", "modelopt:e4m3@channel": "float8_e4m3fn", "modelopt:mxfp8": "mxfp8",
}  # fmt: skip
"""Maps the format of a weight to the format of the inputs of its layer."""
_CACHES = {
    "FP8": (("", "float8_e4m3fn@tensor"),), "NVFP4": (("", "nvfp4"),),
    "FP8_K_NVFP4_V": (("k", "float8_e4m3fn@tensor"), ("v", "nvfp4")),
}  # fmt: skip
"""Maps an algorithm for KV caches to the formats of "k", "v" or both ("")."""


class _Layout(msgspec.Struct, frozen=True):
    """How an algorithm of ModelOpt stores a weight."""

    kind: str
    dtypes: tuple[str, ...]
    """The dtypes that the codes may have."""
    block: str | int
    """The columns of a block if the settings declare no `group_size`; "channel" for a scale per row, or "tensor" for one in all."""
    scales: tuple[str, ...] = FLOATS
    settings: Mapping[str, Any] = {}
    tensor_scale: bool = False
    """Whether the weight has a scale for the whole tensor."""
    height: int = 1
    """The rows of a block, or 0 if its rows are as many as its columns."""


_NVFP4 = _Layout("nvfp4", ("uint8",), 16, ("float8_e4m3fn",), {"code": "e2m1"}, True)
_MXFP4 = _Layout("mxfp4", ("uint8",), 32, EXPONENTS, {"code": "e2m1"})
_INT4 = _Layout("int4", ("uint8",), 128, FLOATS, {"code": "row pairs"})
_LAYOUTS: Mapping[str, _Layout] = {
    "FP8": _Layout("e4m3", tuple(FP8), "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": _Layout("e4m3", tuple(FP8), "channel"),
    **dict.fromkeys(("FP8_PB_WO", "FP8_PB_REAL"), _Layout("e4m3", tuple(FP8), 128, height=0)),
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "W4A8_NVFP4_FP8", "NVFP4_SVD"), _NVFP4),
    **dict.fromkeys(("MXFP4", "W4A8_MXFP4_FP8"), _MXFP4),
    "MXFP8": _Layout("mxfp8", tuple(FP8), 32, EXPONENTS),
    **dict.fromkeys(("W4A16_AWQ", "W4A8_AWQ"), _INT4),
    **dict.fromkeys(("W8A16", "W8A8_SQ_PER_CHANNEL"), _Layout("int8", ("int8",), "channel")),
}


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    settings = dict(declared(config))
    if not str(settings.get("quant_method") or "modelopt").startswith("modelopt") or not tensors:
        return
    beside = next(iter(tensors.values())).file.parent / _BESIDE_CONFIG
    if beside.is_file():
        more = mapping(read_json(beside).get("quantization"))
        refuse_many_entries(more, str(beside), len(tensors))
        settings |= more
    layers = settings.get("quantized_layers") if settings.get("quant_algo") == "MIXED_PRECISION" else None
    found = Targets(layers) if isinstance(layers, Mapping) else None
    for scale in tensors if settings.get("quant_algo") is not None else ():
        name = scale.removesuffix("_scale")
        if name != scale and name.endswith("weight"):
            own = settings if found is None else _of_layer(name.rpartition(".")[0], mapping(layers), found)
            yield _read_weight(name, own, tensors)


def _of_layer(module: str, layers: Mapping[str, Any], found: Targets) -> Mapping[str, Any]:
    """Return the settings of a module in `layers`, which has them by name or pattern. found: finds the entries of `layers`."""
    holders = [module[:end] for end in range(len(module), 0, -1) if end == len(module) or module[end] == "."]
    entry = next((layers[holder] for holder in holders if holder in layers), None)
    return mapping(entry or next((layers[name] for name in found.of(module)), None))


def _read_weight(name: str, settings: Mapping[str, Any], tensors: Tensors) -> CodedWeight | None:
    layout, codes = _LAYOUTS.get(str(settings.get("quant_algo")).upper()), tensors.get(name)
    if layout is None or codes is None or codes.dtype not in layout.dtypes or len(codes.shape) != 2:
        return None
    rows, columns = codes.shape
    packing = layout.settings.get("code")
    shape = (2 * rows, columns) if packing == "row pairs" else (rows, 2 * columns if packing else columns)
    block: tuple[int, int] | str
    if isinstance(layout.block, str):
        block = layout.block
    else:
        width = size(settings.get("group_size")) or layout.block
        block = (layout.height or width, width)
    parts: dict[str, CheckpointTensor | None] = {CODES: codes, "scale": tensors[f"{name}_scale"]}
    of_tensor, of_inputs = tensors.get(f"{name}_scale_2"), tensors.get(f"{name.rpartition('.')[0]}.pre_quant_scale")
    if layout.tensor_scale:
        parts["tensor_scale"], of_tensor = of_tensor, None
    if of_inputs is not None:
        parts["input_scale"] = of_inputs
    kind = layout.kind
    if low_rank := _low_rank(name, shape, tensors):
        if layout is not _NVFP4 or None in low_rank.values():
            return None
        parts, kind = parts | low_rank, "nvfp4_svd"
    weight = describe(name, SCHEME, kind, shape, block, parts, scales=layout.scales, settings=layout.settings)
    return with_beside(weight, of_tensor)


def _low_rank(name: str, shape: tuple[int, int], tensors: Tensors) -> dict[str, CheckpointTensor | None]:
    """Return the matrices whose product is added to a weight, by their roles: None for one that is missing or does not fit. {} if
    the files have neither.
    """
    module = name.rpartition(".")[0]
    down, up = (
        next((found for begin in LOW_RANK if (found := tensors.get(f"{module}.{begin}{end}"))), None) for end in "ab"
    )
    if down is None and up is None:
        return {}
    if down is None or up is None or not {down.dtype, up.dtype} <= {*FLOATS}:
        return {"down": None, "up": None}
    fits = (up.shape[:1], down.shape[1:], up.shape[1:]) == (shape[:1], shape[1:], down.shape[:1])
    return {"down": down, "up": up} if fits else {"down": None, "up": None}


def _input_format(weight: CodedWeight, settings: Mapping[str, Any]) -> str:
    if weight.format == "modelopt:nvfp4":
        return "nvfp4" if weight.input_scale is not None else ""
    return _INPUTS.get(weight.format, "")


def _cache_formats(settings: Config) -> tuple[tuple[str, str, str], ...]:
    layers = settings.get("kv_cache_quantized_layers")
    if not isinstance(layers, Mapping):
        layers = {"": {"quant_algo": settings.get("kv_cache_quant_algo")}}
    algorithms = {module: mapping(of_module).get("quant_algo") for module, of_module in layers.items()}
    return tuple(
        (module, part, form)
        for module, algorithm in algorithms.items()
        if isinstance(module, str) and isinstance(algorithm, str)
        for part, form in _CACHES.get(algorithm, (("", algorithm),))
    )


SCHEME = Scheme(
    "modelopt", "block_scaled", _read, input_format=_input_format, settings_files=(_BESIDE_CONFIG,),
    nested_settings=("quantization",), ignored=("ignore", "exclude_modules"), ignored_by=("modelopt",),
    cache_formats=_cache_formats,
)  # fmt: skip
