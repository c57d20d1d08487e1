"""Weights quantized by HQQ, as `HQQLinear.state_dict` writes them: codes of 1 to 8 bits. Each group has a scale and a zero point,
which are both floats. `x` is a layer.

HQQ reshapes the weight [out, in] before it quantizes it: to [in * out / group, group] for axis 1, or to [group, in * out / group]
for axis 0. Then it cuts the rows of this matrix into equal parts. The number of parts is the number of codes in an element of
`x.W_q`: two for codes of 4 bits in uint8, or ten for codes of 3 bits in int32. Each element holds one code of every part, and the
code of the first part is in the highest bits. Small tensors hold the shape, the axis and the name of the packing.
"""

from __future__ import annotations

import math

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import block_name
from dtype_engine.checkpoint.schemes.layout import BYTES, WORDS, Config, Layout, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import FLOATS
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Metadata, Scheme, Weights
from dtype_engine.checkpoint.schemes.small_tensors import read_small

PACKINGS = {"8bit_u8": (8, 1), "4bit_u8": (4, 2), "3bit_32": (3, 10), "2bit_u8": (2, 4), "1bit_u8": (1, 8)}
"""Maps the name of a packing to (bits of a code, number of codes in an element of `W_q`)."""
_NEEDED, _SIZE = ("shape", "axis", "packing"), "group_size"
_UNREAD = ("view_as_float", "quant_scale", "quant_zero")
"""Settings of HQQ that change the layout if they are not 0. A weight with such a setting is not read."""


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    return (_weight(name.removesuffix("W_q"), tensors) for name in tensors if name.endswith(".W_q"))


def _weight(stem: str, tensors: Tensors) -> CodedWeight | None:
    own = {end: tensors[stem + end] for end in ("W_q", "scale", *_LAYOUT.more) if stem + end in tensors}
    if any(end not in own for end in ("scale", "zero", *_NEEDED)):
        return None
    codes, scale, zero = own.pop("W_q"), own.pop("scale"), own.pop("zero")
    if any(_number(own[end]) for end in _UNREAD if end in own) or own["shape"].shape != (2,):
        return None
    bits, together = PACKINGS.get(read_small(own["packing"]).decode("ascii", "replace"), (0, 1))
    half, raw = own["shape"].nbytes // 2, read_small(own["shape"])
    rows, columns = (int.from_bytes(extent, "little", signed=True) for extent in (raw[:half], raw[half:]))
    axis, groups = _number(own["axis"]), math.prod(scale.shape)
    if min(rows, columns, groups, bits) <= 0 or axis not in (0, 1) or rows * columns % groups:
        return None
    size = rows * columns // groups
    if _SIZE in own and _number(own[_SIZE]) != size:
        return None
    grouped = (groups, size) if axis else (size, groups)
    fits = columns % size == 0 if axis else groups % columns == 0  # no group begins inside a row and ends in the next
    packed = (-(-grouped[0] // together), grouped[1])
    padded = bits != 3 and grouped[0] % together
    if not fits or padded or codes.shape != packed or codes.dtype != ("int32" if bits == 3 else "uint8"):
        return None
    if any(part.dtype not in FLOATS or part.shape != ((groups, 1) if axis else (1, groups)) for part in (scale, zero)):
        return None
    form = f"{SCHEME.name}:int{bits}@{block_name(size, columns) if axis else f'g{size}'}"
    parts, settings = {CODES: codes, "scale": scale, "zero": zero}, {"bits": bits, "together": together, "axis": axis}
    return CodedWeight(f"{stem}weight", (rows, columns), SCHEME, form, parts, settings, tuple(own.values()))


def _number(tensor: CheckpointTensor) -> int:
    return int.from_bytes(read_small(tensor), "little", signed=True)


_LAYOUT = Layout(
    "packed by HQQ", "W_q", "scale", BYTES | WORDS,
    ("zero", "meta", "axis", "channel_wise", "compute_dtype", "encoded_state_dict", "group_size", "nbits", "offload_meta",
     "optimize", "packing", "quant_scale", "quant_zero", "round_zero", "shape", "stores_quant_config", "unpack_view_dtype",
     "view_as_float"),
    alone=(".W_q",), signed=True, part_shapes=lambda weight, tensors, _: {"zero": tensors[weight.scale].shape},
)  # fmt: skip
SCHEME = Scheme(
    "hqq", "hqq", _read, (_LAYOUT,), describing=tuple(f".{local}" for local in (*_NEEDED, _SIZE, *_UNREAD)),
    nested_settings=("quant_config", "weight_quant_params"), ignored=("skip_modules",),
)  # fmt: skip
