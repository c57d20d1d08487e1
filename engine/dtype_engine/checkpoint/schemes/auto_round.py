"""Weights in floats that AutoRound writes in its own format (`quant_method: auto-round` in config.json). `x` is a layer.

The tensors are those of compressed-tensors: NVFP4 and MXFP4 have their codes in `x.weight_packed`, MXFP8 and float8 in `x.weight`.
`x.weight_scale` holds the scales, or `x.weight_scale_inv` those of blocks of float8. Dtypes and shapes tell the formats apart, so
the settings of single layers (`extra_config`) are not needed. MXINT4, weights with `x.weight_zp`, and models whose activations are
rotated are not read. AutoRound's integers are in the layouts of GPTQ and AWQ.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from dtype_engine.checkpoint.schemes.compressed_tensors import read_weight
from dtype_engine.checkpoint.schemes.configuration import declared, quant_method, size, sizes
from dtype_engine.checkpoint.schemes.layout import Config, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import FLOATS, FP8, describe
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Metadata, Scheme, Weights

_ROTATED = ("rotation_config", "spinquant_config")
"""The settings of models whose activations are rotated."""
_KINDS = (
    {"num_bits": 4, "strategy": "group", "group_size": 32}, {"num_bits": 4, "strategy": "group", "group_size": 16},
    {"num_bits": 8, "strategy": "group", "group_size": 32}, {"num_bits": 8, "strategy": "channel"},
    {"num_bits": 8, "strategy": "tensor"},
)  # fmt: skip
"""The settings of compressed-tensors that may describe a weight."""
_INPUTS: Mapping[tuple[str, int | None], str] = {
    ("nv", 4): "nvfp4", ("mx", 4): "mxfp4", ("mx", 8): "mxfp8", ("fp", 8): "float8_e4m3fn",
}  # fmt: skip
"""Maps (beginning of `act_data_type`, `act_bits`) to the format of the inputs of a layer."""


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    settings = declared(config)
    if quant_method(settings) != SCHEME.name or any(settings.get(key) for key in _ROTATED):
        return
    block = sizes(settings.get("group_size"))
    for scale in tensors:
        name = scale.removesuffix("_inv").removesuffix("_scale")
        if not name.endswith("weight") or scale == name or f"{name}_zp" in tensors:
            continue
        if scale.endswith("_inv"):
            yield None if block is None else _read_blocks(name, block, tensors)
            continue
        for kind in _KINDS:
            weight = read_weight(name, {"type": "float", **kind}, tensors)
            if weight is not None:
                form = f"{SCHEME.name}:{weight.format.partition(':')[2]}"
                yield replace(weight, scheme=SCHEME, format=form)
                break


def _read_blocks(name: str, block: tuple[int, int], tensors: Tensors) -> CodedWeight | None:
    codes = tensors.get(name)
    if codes is None or codes.dtype not in FP8:
        return None
    parts = {CODES: codes, "scale": tensors[f"{name}_scale_inv"]}
    return describe(name, SCHEME, FP8[codes.dtype], codes.shape, block, parts, scales=FLOATS)


def _input_format(weight: CodedWeight, settings: Config) -> str:
    found = _INPUTS.get((str(settings.get("act_data_type"))[:2], size(settings.get("act_bits"))), "")
    if "e5m3" in weight.format or (found == "nvfp4" and weight.input_scale is None):
        return ""
    return f"{found}@tensor" if found == "float8_e4m3fn" and settings.get("act_dynamic") is False else found


SCHEME = Scheme("auto-round", "block_scaled", _read, input_format=_input_format, reciprocal_scales=True)
