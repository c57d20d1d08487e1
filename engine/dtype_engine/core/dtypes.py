"""The table of dtypes: their names everywhere, bits, range, and what a storage format is made of. Without torch.

Names are torch's; `@tensor` behind a storage dtype says that a whole tensor shares one scale, where otherwise every
output channel has its own. Ranges are those of the formats themselves (IEEE 754; OCP FP8 for the float8 types), checked
in the tests against `torch.finfo`. This module never imports torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dtype_engine.core.errors import UserError
from dtype_engine.core.suggest import nearest

STORED = "stored"
"""In place of a dtype in a rule: leave the tensor as the checkpoint has it."""


PER_TENSOR = "@tensor"


@dataclass(frozen=True, slots=True)
class DType:
    """One dtype. `max` is its largest finite value, `tiny` its smallest normal one."""

    name: str
    short_name: str
    bits: int
    kind: Literal["float", "int", "bool", "complex"]
    safetensors: str | None
    exponent: int = 0
    mantissa: int = 0
    max: float = 0.0
    tiny: float = 0.0
    per_tensor: bool = False

    @property
    def torch_name(self) -> str:
        """The name of torch's own dtype that the values are kept in."""
        return self.name.removesuffix(PER_TENSOR)


def _float(
    name: str, short_name: str, safetensors: str, exponent: int, mantissa: int, top: float, tiny: float
) -> DType:
    bits = 1 + exponent + mantissa
    return DType(name, short_name, bits, "float", safetensors, exponent, mantissa, top, tiny)


_TABLE = (
    _float("float64", "f64", "F64", 11, 52, math.ldexp(2 - 2**-52, 1023), math.ldexp(1, -1022)),
    _float("float32", "f32", "F32", 8, 23, math.ldexp(2 - 2**-23, 127), math.ldexp(1, -126)),
    _float("bfloat16", "bf16", "BF16", 8, 7, math.ldexp(2 - 2**-7, 127), math.ldexp(1, -126)),
    _float("float16", "f16", "F16", 5, 10, 65504.0, math.ldexp(1, -14)),
    _float("float8_e4m3fn", "fp8", "F8_E4M3", 4, 3, 448.0, math.ldexp(1, -6)),
    _float("float8_e5m2", "fp8e5", "F8_E5M2", 5, 2, 57344.0, math.ldexp(1, -14)),
    _float("float8_e4m3fnuz", "fp8fnuz", "F8_E4M3FNUZ", 4, 3, 240.0, math.ldexp(1, -7)),
    _float("float8_e5m2fnuz", "fp8e5fnuz", "F8_E5M2FNUZ", 5, 2, 57344.0, math.ldexp(1, -15)),
    DType("float8_e8m0fnu", "e8m0", 8, "float", "F8_E8M0", 8, 0, 2.0**127, 2.0**-127),
    DType("float4_e2m1fn_x2", "fp4", 4, "float", "F4", 2, 1, 6.0, 1.0),
    DType("int8", "i8", 8, "int", "I8", max=127),
    DType("int64", "i64", 64, "int", "I64", max=2**63 - 1),
    DType("int32", "i32", 32, "int", "I32", max=2**31 - 1),
    DType("int16", "i16", 16, "int", "I16", max=2**15 - 1),
    DType("uint8", "u8", 8, "int", "U8", max=255),
    DType("uint16", "u16", 16, "int", "U16", max=2**16 - 1),
    DType("uint32", "u32", 32, "int", "U32", max=2**32 - 1),
    DType("uint64", "u64", 64, "int", "U64", max=2**64 - 1),
    DType("bool", "bool", 8, "bool", "BOOL", max=1),
    DType("complex64", "c64", 64, "complex", "C64"),
    DType("complex128", "c128", 128, "complex", None),
)

SCALE_BYTES = 4
"""A scale is a float32."""
PER_CHANNEL_SCALES = ("float8_e4m3fn", "float8_e5m2", "int8")

_PER_TENSOR_SCALES = tuple(
    dataclasses.replace(
        dtype, name=dtype.name + PER_TENSOR, short_name=dtype.short_name + "@t", safetensors=None, per_tensor=True
    )
    for dtype in _TABLE
    if dtype.name in PER_CHANNEL_SCALES
)

BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in (*_TABLE, *_PER_TENSOR_SCALES)}
BY_SAFETENSORS: dict[str, DType] = {dtype.safetensors: dtype for dtype in _TABLE if dtype.safetensors}

COMPUTE_DTYPES = ("float64", "float32", "bfloat16", "float16")
"""The dtypes a forward pass computes in, largest first."""
STORAGE_DTYPES = (*PER_CHANNEL_SCALES, *(dtype.name for dtype in _PER_TENSOR_SCALES))
"""Codes and scales: dequantized to a compute dtype when used. What they are is written in `runtime/numerics/quantize.py`."""
CASTABLE_DTYPES = COMPUTE_DTYPES + STORAGE_DTYPES
"""Everything a rule may cast to, besides `STORED`."""

_ALIASES = {
    "half": "float16", "fp16": "float16", "bf": "bfloat16", "float": "float32", "single": "float32", "fp32": "float32",
    "double": "float64", "fp64": "float64", "fp8": "float8_e4m3fn", "f8": "float8_e4m3fn", "e4m3": "float8_e4m3fn",
    "e4m3fn": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "float8_e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
    "fp8_e5m2": "float8_e5m2", "keep": STORED, "original": STORED,
}  # fmt: skip
_SCALES = {"tensor": PER_TENSOR, "t": PER_TENSOR, "channel": "", "c": ""}


def info(name: str) -> DType:
    """The row of one of torch's dtype names. Raises KeyError for a name that is none."""
    return BY_NAME[name]


def short_name(name: str) -> str:
    """The short form for a short_name: `bf16` for `bfloat16`; names not in the table stay as they are."""
    row = BY_NAME.get(name)
    return row.short_name if row else name


def parse_target(text: str) -> str:
    """Read what a user wrote for a dtype to cast to (`bf16`, `torch.bfloat16`, `half`, `stored`).

    Returns a name of `CASTABLE_DTYPES`, or `STORED`. Raises UserError with the nearest name otherwise.
    """
    whole = text.strip().lower().removeprefix("torch.")
    word, at, scale = whole.partition("@")
    names = (
        _ALIASES
        | {BY_NAME[name].short_name: name for name in CASTABLE_DTYPES}
        | {name: name for name in CASTABLE_DTYPES}
        | {STORED: STORED}
    )
    if at and word in names:
        if names[word] not in PER_CHANNEL_SCALES or scale not in _SCALES:
            raise UserError(
                f"unknown dtype {text.strip()!r}: only {', '.join(PER_CHANNEL_SCALES)} have scales, @channel or @tensor"
            )
        return names[word] + _SCALES[scale]
    if whole in names:
        return names[whole]
    if word in BY_NAME:
        raise UserError(f"can't cast to {word}: weights may be {', '.join(CASTABLE_DTYPES)}, or {STORED}")
    near = nearest(word, names, cutoff=0.5)
    hint = f"did you mean {near}?" if near else f"use one of {', '.join(CASTABLE_DTYPES)}, or {STORED}"
    raise UserError(f"unknown dtype {text.strip()!r}: {hint}")


def has_channel_scales(shape: Sequence[int], dtype: str) -> bool:
    """Whether a tensor of this shape has a scale for each output channel (its first dimension) in a storage dtype.

    Matrices and above have, unless the dtype is `@tensor`. A vector or scalar has one scale for all.
    """
    return len(shape) >= 2 and not BY_NAME[dtype].per_tensor


def scale_count(shape: Sequence[int], dtype: str) -> int:
    """How many float32 scales a tensor of this shape carries in a storage dtype."""
    return shape[0] if has_channel_scales(shape, dtype) else 1


def nbytes_in(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a tensor of `shape` after a cast to `dtype`, the scales of a storage dtype included."""
    row = BY_NAME[dtype]
    codes = math.prod(shape) * row.bits // 8
    return codes + SCALE_BYTES * scale_count(shape, dtype) if dtype in STORAGE_DTYPES else codes


def widest(stored: Iterable[str]) -> str:
    """The dtype that holds the values of all the computed ones among these; float32 where there is none."""
    stored_floats = {dtype for dtype in stored if dtype in COMPUTE_DTYPES}
    if not stored_floats:
        return "float32"
    if stored_floats >= {"bfloat16", "float16"}:
        stored_floats.add("float32")
    return next(name for name in COMPUTE_DTYPES if name in stored_floats)
