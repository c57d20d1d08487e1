"""The table of dtypes: their names everywhere, bits, range, and whether one can compute in them.

Names are torch's; `@tensor` behind a storage-only one says that a whole tensor shares one scale, where otherwise
every output channel has its own. Ranges are those of the formats themselves (IEEE 754; OCP FP8 for the float8 types),
checked in the tests against `torch.finfo`. This module never imports torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Literal

from dtype_engine.core.errors import UserError

STORED = "stored"
"""In place of a dtype in a rule: leave the tensor as the checkpoint has it."""


PER_TENSOR = "@tensor"


@dataclass(frozen=True, slots=True)
class DType:
    """One dtype. `max` is its largest finite value, `tiny` its smallest normal one."""

    name: str
    badge: str
    bits: int
    kind: Literal["float", "int", "bool", "complex"]
    safetensors: str | None
    exponent: int = 0
    mantissa: int = 0
    max: float = 0.0
    tiny: float = 0.0
    storage_only: bool = False
    per_tensor: bool = False

    @property
    def torch_name(self) -> str:
        """The name of torch's own dtype that the values are kept in."""
        return self.name.removesuffix(PER_TENSOR)


def _float(name: str, badge: str, safetensors: str, exponent: int, mantissa: int, top: float, tiny: float) -> DType:
    bits = 1 + exponent + mantissa
    return DType(name, badge, bits, "float", safetensors, exponent, mantissa, top, tiny, storage_only=bits <= 8)


_TABLE = (
    _float("float64", "f64", "F64", 11, 52, math.ldexp(2 - 2**-52, 1023), math.ldexp(1, -1022)),
    _float("float32", "f32", "F32", 8, 23, math.ldexp(2 - 2**-23, 127), math.ldexp(1, -126)),
    _float("bfloat16", "bf16", "BF16", 8, 7, math.ldexp(2 - 2**-7, 127), math.ldexp(1, -126)),
    _float("float16", "f16", "F16", 5, 10, 65504.0, math.ldexp(1, -14)),
    _float("float8_e4m3fn", "fp8", "F8_E4M3", 4, 3, 448.0, math.ldexp(1, -6)),
    _float("float8_e5m2", "fp8e5", "F8_E5M2", 5, 2, 57344.0, math.ldexp(1, -14)),
    _float("float8_e4m3fnuz", "fp8fnuz", "F8_E4M3FNUZ", 4, 3, 240.0, math.ldexp(1, -7)),
    _float("float8_e5m2fnuz", "fp8e5fnuz", "F8_E5M2FNUZ", 5, 2, 57344.0, math.ldexp(1, -15)),
    DType("float8_e8m0fnu", "e8m0", 8, "float", "F8_E8M0", 8, 0, 2.0**127, 2.0**-127, storage_only=True),
    DType("float4_e2m1fn_x2", "fp4", 4, "float", "F4", 2, 1, 6.0, 1.0, storage_only=True),
    DType("int8", "i8", 8, "int", "I8", max=127, storage_only=True),
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

PER_CHANNEL_SCALES = ("float8_e4m3fn", "float8_e5m2", "int8")

_ONE_SCALE = tuple(
    dataclasses.replace(
        dtype, name=dtype.name + PER_TENSOR, badge=dtype.badge + "@t", safetensors=None, per_tensor=True
    )
    for dtype in _TABLE
    if dtype.name in PER_CHANNEL_SCALES
)

BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in (*_TABLE, *_ONE_SCALE)}
BY_SAFETENSORS: dict[str, DType] = {dtype.safetensors: dtype for dtype in _TABLE if dtype.safetensors}

COMPUTE_DTYPES = ("float64", "float32", "bfloat16", "float16")
"""The dtypes a forward pass computes in, largest first."""
STORAGE_DTYPES = (*PER_CHANNEL_SCALES, *(dtype.name for dtype in _ONE_SCALE))
"""Kept with a scale and brought back to a computed dtype when used."""
TARGETS = COMPUTE_DTYPES + STORAGE_DTYPES
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


def badge(name: str) -> str:
    """The short form for a badge: `bf16` for `bfloat16`; names not in the table stay as they are."""
    found = BY_NAME.get(name)
    return found.badge if found else name


def parse_target(text: str) -> str:
    """Read what a user wrote for a dtype to cast to (`bf16`, `torch.bfloat16`, `half`, `stored`).

    Returns a name of `TARGETS`, or `STORED`. Raises UserError with the nearest name otherwise.
    """
    whole = text.strip().lower().removeprefix("torch.")
    word, at, scale = whole.partition("@")
    names = (
        _ALIASES | {BY_NAME[name].badge: name for name in TARGETS} | {name: name for name in TARGETS} | {STORED: STORED}
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
        raise UserError(f"can't cast to {word}: weights may be {', '.join(TARGETS)}, or {STORED}")
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(TARGETS)}, or {STORED}"
    raise UserError(f"unknown dtype {text.strip()!r}: {hint}")


def scale_count(shape: tuple[int, ...], dtype: str) -> int:
    """How many float32 scales a tensor of this shape carries in a storage-only dtype.

    One per output channel (the first dimension) for matrices and above, one for a vector or scalar; one for all where
    the dtype is `@tensor`.
    """
    return shape[0] if len(shape) >= 2 and not BY_NAME[dtype].per_tensor else 1


def stored_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a tensor of `shape` after a cast to `dtype`, the scales of a storage-only dtype included."""
    row = BY_NAME[dtype]
    size = math.prod(shape) * row.bits // 8
    if dtype in STORAGE_DTYPES:
        size += 4 * scale_count(shape, dtype)
    return size
