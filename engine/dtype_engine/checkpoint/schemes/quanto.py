"""Weights quantized by optimum-quanto. For a layer `x` with 8 bits, `x.weight._data` holds int8 or float8 codes, and
`x.weight._scale` holds a scale for each output channel.

With 4 or 2 bits, the values of a weight, row by row, form a matrix [groups, group size], and `x.weight._data._data` holds the codes
of this matrix: a byte holds codes of two or four rows, the lowest bits those of the first half or quarter of the rows.
`x.weight._scale` [groups, 1] holds factors, and `x.weight._shift` [groups, 1] holds offsets that are subtracted. The weight's shape
is not in the file. It is computed from the length of the layer's bias or, for layers with names that are usual in language models,
from the configuration. Weights whose shape can't be found in this way are not read.
"""

from __future__ import annotations

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import block_name, mapping, size
from dtype_engine.checkpoint.schemes.layout import BYTES, FLOAT8, Config, Layout, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import FLOATS, FP8
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Metadata, Scheme, Weights

_CODES = {"int8": "int8", "float8_e4m3fnuz": "e4m3fnuz", **FP8}


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    for name, codes in tensors.items():
        if name.endswith("._data._data"):
            yield _bits(name.removesuffix("._data._data"), codes, tensors, config)
        elif name.endswith("._data"):
            yield _bytes(name.removesuffix("._data"), codes, tensors.get(f"{name.removesuffix('data')}scale"))


def _bytes(name: str, codes: CheckpointTensor, scale: CheckpointTensor | None) -> CodedWeight | None:
    if scale is None or codes.dtype not in _CODES or scale.dtype not in FLOATS:
        return None
    if len(codes.shape) < 2 or not codes.nbytes or scale.shape != (codes.shape[0], *(1 for _ in codes.shape[1:])):
        return None
    form = f"{SCHEME.name}:{_CODES[codes.dtype]}@channel"
    return CodedWeight(name, codes.shape, SCHEME, form, {CODES: codes, "scale": scale})


def _bits(name: str, codes: CheckpointTensor, tensors: Tensors, config: Config) -> CodedWeight | None:
    scale, shift = tensors.get(f"{name}._scale"), tensors.get(f"{name}._shift")
    if scale is None or shift is None or codes.dtype != "uint8" or len(codes.shape) != 2 or not codes.nbytes:
        return None
    groups, width = scale.shape[0] if scale.shape else 0, codes.shape[1]
    bits = next((bits for bits in (4, 2) if -(-groups * bits // 8) == codes.shape[0]), None)
    if bits is None or not groups or scale.shape != (groups, 1) or shift.shape != scale.shape:
        return None
    if scale.dtype not in FLOATS or shift.dtype not in (*FLOATS, "int8", "uint8"):
        return None
    elements, bias = groups * width, tensors.get(f"{name.rpartition('.')[0]}.bias")
    if bias is not None and len(bias.shape) == 1 and bias.nbytes:
        columns: int | None = elements // bias.shape[0]
    else:
        columns = _columns(name, config)
    if columns is None and width not in (32, 64, 96, 128):
        columns = width
    if not columns or elements % columns:
        return None
    # A whole row shares a scale if it has at most 128 values, or if no group size divides its length.
    if width != next((each for each in (128, 96, 64, 32) if columns > 128 and columns % each == 0), columns):
        return None
    shape = elements // columns, columns
    if bias is not None and bias.shape != shape[:1]:
        return None
    form = f"{SCHEME.name}:int{bits}@{block_name(width, shape[1])}"
    return CodedWeight(name, shape, SCHEME, form, {CODES: codes, "scale": scale, "shift": shift}, {"bits": bits})


def _columns(name: str, config: Config) -> int | None:
    """Return the number of inputs of a linear layer by its name, such as `q_proj`, from config.json, or None if unknown."""
    settings = {**config, **mapping(config.get("text_config"))}
    hidden, heads = size(settings.get("hidden_size")), size(settings.get("num_attention_heads"))
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module in ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "lm_head"):
        return hidden
    if module == "down_proj":
        return size(settings.get("intermediate_size"))
    if module == "o_proj" and hidden and heads:
        return heads * (size(settings.get("head_dim")) or hidden // heads)
    return None


_BESIDE = ("input_scale", "output_scale")
_PACKED = Layout(
    "packed by optimum-quanto", "._data._data", "._scale", BYTES, ("._shift",), _BESIDE, alone=("weight._data._data",)
)
_WHOLE = Layout(
    "quantized by optimum-quanto", "._data", "._scale", FLOAT8 | BYTES, ("._shift",), _BESIDE, alone=("weight._data",),
    orphans=("weight._scale",),
)  # fmt: skip
SCHEME = Scheme("quanto", "quanto", _read, (_PACKED, _WHOLE))
