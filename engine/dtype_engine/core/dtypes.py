"""The table of dtypes: names, bits, range, and the blocks of storage formats.

Names are torch's. A storage dtype is only stored and not computed in, such as float8 or int8. It has one scale for each output
channel, or those that the end of its name says (`Scales`). Formats with a scale for each block have the names that
quantizers and runtimes use; `block_formats` describes their blocks, and `llama_types` llama.cpp's own types. Ranges are from the
definitions of the formats (IEEE 754; OCP FP8 for the float8 types; OCP MX for 4 and 6 bits); tests compare them with `torch.finfo`
and `ml_dtypes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from dtype_engine.core.block_formats import Blocks, divides, parts, scale_grid
from dtype_engine.core.errors import UserError
from dtype_engine.core.llama_types import BY_DTYPE, IMATRIX, LLAMA_DTYPES, LLAMA_TYPES, LlamaType, fitted, nbytes_of
from dtype_engine.core.roundings import ROUNDED_FORMATS, ROUNDINGS
from dtype_engine.core.suggest import nearest

STORED = "stored"
"""The target of a rule, in place of a dtype, whose tensors keep the dtypes that they have in the checkpoint."""


PER_TENSOR = "@tensor"
Scales = Literal["channel", "row", "tensor", "fused"]
"""What has one scale in a format without blocks: an index of the first dimension; a row of the last, so that each output of each
expert has its own (`@row`); the whole tensor (`@tensor`); or all tensors together that runtimes fuse into one layer (`@fused`).
"""


class DType(msgspec.Struct, frozen=True):
    """One dtype. For a block format, bits and range are those of one element, without the scales."""

    name: str
    short_name: str
    bits: int
    kind: Literal["float", "int", "bool", "complex"]
    safetensors: str | None
    """The dtype's name in a safetensors header, or None if safetensors lacks it."""
    exponent: int = 0
    """The number of exponent bits."""
    mantissa: int = 0
    """The number of mantissa bits, without the implicit leading one."""
    max: float = 0.0
    """The largest finite value."""
    tiny: float = 0.0
    """The smallest positive normal value."""
    scales: Scales = "channel"
    """What has one scale, in a format with scales and without blocks."""
    blocks: Blocks | None = None
    code_dtype: str = ""
    """torch's name for the dtype of the codes while a model runs, such as float8_e4m3fn for mxfp4. "": this dtype itself."""
    rounding: str = ""
    """The rounding of a format, a name in `roundings.ROUNDINGS`. "": the nearest value under the scale of the largest |value|."""
    llama: LlamaType | None = None
    """The type of llama.cpp that this is, or None. A running model holds its values as float32, without their scales."""
    weight_only: bool = False
    """Whether runtimes leave the activations that weights in this format multiply unquantized."""

    @property
    def torch_name(self) -> str:
        """torch's name for the dtype in a running model. For a format with scales, the dtype of its codes."""
        return self.code_dtype or self.name.partition("@")[0]

    @property
    def per_tensor(self) -> bool:
        """Whether a tensor has one scale for all its values, instead of one for each output channel, row or block."""
        return self.scales in ("tensor", "fused")


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
"""Size in bytes of the scale of a channel or tensor, which is a float32."""
PER_CHANNEL_SCALES = ("float8_e4m3fn", "float8_e5m2", "int8")

_OTHER_SCALES: dict[Scales, tuple[str, ...]] = {
    "tensor": PER_CHANNEL_SCALES, "fused": ("float8_e4m3fn",), "row": ("float8_e4m3fn", "int8"),
}  # fmt: skip
"""The dtypes that also exist with other scales than one for each channel."""
_WITH_OTHER_SCALES = tuple(
    msgspec.structs.replace(
        dtype,
        name=f"{dtype.name}@{scales}",
        short_name=f"{dtype.short_name}@{scales[0]}",
        safetensors=None,
        scales=scales,
        weight_only=scales == "row" and dtype.kind == "int",
    )
    for scales, names in _OTHER_SCALES.items()
    for dtype in _TABLE
    if dtype.name in names
)

_MX_E4M3 = DType("", "", 8, "float", None, 4, 3, 448.0, 2.0**-6, code_dtype="float8_e4m3fn")
_MX_E2M1 = DType("", "", 4, "float", None, 2, 1, 6.0, 1.0, code_dtype="float8_e4m3fn")
_E2M3 = DType("", "", 6, "float", None, 2, 3, 7.5, 1.0, code_dtype="float8_e4m3fn")
_E3M2 = DType("", "", 6, "float", None, 3, 2, 28.0, 2.0**-2, code_dtype="float8_e4m3fn")
_INT4 = DType("", "", 4, "int", None, max=7, code_dtype="int8", weight_only=True)
_INT8 = DType("", "", 8, "int", None, max=127, code_dtype="int8", weight_only=True)


def _format(name: str, short_name: str, element: DType, blocks: Blocks) -> DType:
    return msgspec.structs.replace(element, name=name, short_name=short_name, blocks=blocks)


_MXFP8 = Blocks(1, 32, "uint8", "compressed-tensors", layout="mxfp8-quantized")
_MXFP4 = Blocks(1, 32, "uint8", "compressed-tensors", packing="nibbles", layout="mxfp4-pack-quantized")
_MXFP6 = Blocks(1, 32, "uint8", "even", packing="six bits")
_FP8_BLOCK = Blocks(128, 128, "float32", layout="float-quantized")
_FP8_BLOCK_UE8M0 = msgspec.structs.replace(_FP8_BLOCK, scale="float8_e8m0fnu", rule="rceil", layout="fp8")
_NVFP4 = Blocks(1, 16, "float8_e4m3fn", tensor_scale=True, packing="nibbles", layout="nvfp4-pack-quantized")
_GROUP = Blocks(1, 128, "bfloat16", packing="words", layout="pack-quantized")

_BLOCK_FORMATS = (
    _format("mxfp8", "mxfp8", _MX_E4M3, _MXFP8),
    _format("mxfp8:floor", "mxfp8:f", _MX_E4M3, msgspec.structs.replace(_MXFP8, rule="floor")),
    _format("mxfp8:rceil", "mxfp8:r", _MX_E4M3, msgspec.structs.replace(_MXFP8, rule="rceil")),
    _format("mxfp8:even", "mxfp8:e", _MX_E4M3, msgspec.structs.replace(_MXFP8, rule="even")),
    _format("mxfp4", "mxfp4", _MX_E2M1, _MXFP4),
    _format("mxfp4:floor", "mxfp4:f", _MX_E2M1, msgspec.structs.replace(_MXFP4, rule="floor")),
    _format("mxfp4:rceil", "mxfp4:r", _MX_E2M1, msgspec.structs.replace(_MXFP4, rule="rceil")),
    _format("mxfp4:even", "mxfp4:e", _MX_E2M1, msgspec.structs.replace(_MXFP4, rule="even")),
    _format("nvfp4", "nvfp4", _MX_E2M1, _NVFP4),
    _format("fp8@128x128", "fp8@128", _MX_E4M3, _FP8_BLOCK),
    _format("fp8@128x128:ue8m0", "fp8@128:u", _MX_E4M3, _FP8_BLOCK_UE8M0),
    _format("int4@g128", "i4@128", _INT4, _GROUP),
    _format("int4@g32", "i4@32", _INT4, msgspec.structs.replace(_GROUP, columns=32)),
    _format("int4@g128a", "i4@128a", _INT4, msgspec.structs.replace(_GROUP, zero_points=True)),
    _format("int8@g128", "i8@128", _INT8, _GROUP),
    _format("mxfp6_e2m3", "mxfp6e2", _E2M3, _MXFP6),
    _format("mxfp6_e3m2", "mxfp6e3", _E3M2, _MXFP6),
)

_ROUNDED = tuple(
    msgspec.structs.replace(
        dtype,
        name=f"{dtype.name}:{rounding}",
        short_name=f"{dtype.short_name}:{ROUNDINGS[rounding].short}",
        safetensors=None,
        code_dtype=dtype.torch_name,
        rounding=rounding,
    )
    for dtype in (*_TABLE, *_BLOCK_FORMATS)
    if dtype.name in ROUNDED_FORMATS
    for rounding in ROUNDINGS
)

_PLAIN_LLAMA = {
    name: DType(name, name, row.bits, "int", None, code_dtype="float32", llama=row) for name, row in LLAMA_TYPES.items()
}
_LLAMA = (
    *_PLAIN_LLAMA.values(),
    *(
        msgspec.structs.replace(
            _PLAIN_LLAMA[row.name],
            name=name,
            short_name=f"{row.name}:{ROUNDINGS[IMATRIX].short}",
            rounding=IMATRIX,
        )
        for name, row in BY_DTYPE.items()
        if name != row.name
    ),
)

BY_NAME: dict[str, DType] = {
    dtype.name: dtype for dtype in (*_TABLE, *_WITH_OTHER_SCALES, *_BLOCK_FORMATS, *_ROUNDED, *_LLAMA)
}
BY_SAFETENSORS: dict[str, DType] = {dtype.safetensors: dtype for dtype in _TABLE if dtype.safetensors}

COMPUTE_DTYPES = ("float64", "float32", "bfloat16", "float16")
"""The dtypes in which a forward pass can compute, largest first."""
WHOLE_SCALE_DTYPES = (
    *PER_CHANNEL_SCALES,
    *(dtype.name for dtype in _WITH_OTHER_SCALES),
    *(dtype.name for dtype in _ROUNDED if dtype.blocks is None),
)
"""Formats with one-byte codes and a float32 scale for each output channel, row or tensor; see `runtime/numerics/quantize.py`."""
BLOCK_FORMATS = tuple(dtype.name for dtype in (*_BLOCK_FORMATS, *_ROUNDED) if dtype.blocks is not None)
"""Formats with codes and a scale for each block; see `runtime/formats/`."""
STORAGE_DTYPES = WHOLE_SCALE_DTYPES + BLOCK_FORMATS + tuple(BY_DTYPE)
"""Formats with codes and scales. A weight is dequantized to a dtype of `COMPUTE_DTYPES` when it is used. Files of safetensors hold
all but the types of llama.cpp.
"""
STORED_FORMATS = tuple(name for name in WHOLE_SCALE_DTYPES + BLOCK_FORMATS if not BY_NAME[name].rounding)
"""The formats that files of safetensors store: without the names that differ from another only in a rounding."""
CASTABLE_DTYPES = COMPUTE_DTYPES + WHOLE_SCALE_DTYPES + BLOCK_FORMATS + LLAMA_DTYPES
"""All dtypes that a rule may cast to, apart from `STORED`."""
UNROUNDED_DTYPES = tuple(
    name
    for name in CASTABLE_DTYPES
    if not (row := BY_NAME[name]).rounding or name.removesuffix(f":{row.rounding}") not in CASTABLE_DTYPES
)
"""`CASTABLE_DTYPES` without those that also exist without their rounding, for lists that a user reads."""

_ALIASES = {
    "half": "float16", "fp16": "float16", "bf": "bfloat16", "float": "float32", "single": "float32", "fp32": "float32",
    "double": "float64", "fp64": "float64", "fp8": "float8_e4m3fn", "f8": "float8_e4m3fn", "e4m3": "float8_e4m3fn",
    "e4m3fn": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "float8_e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
    "fp8_e5m2": "float8_e5m2", "keep": STORED, "original": STORED,
}  # fmt: skip
_SCALES = {"channel": "", "c": ""} | {
    word: f"@{scales}" for scales in _OTHER_SCALES for word in (scales, scales[0])
}  # fmt: skip


def short_name(name: str) -> str:
    """Return the short name of a dtype, such as `bf16`. The short name of another program's format is the part after the colon:
    `int4@g128` for `gptq:int4@g128`. A format of KV caches keeps its `kv:` in front. An unknown name is returned unchanged.
    """
    if name.startswith("kv:"):
        return f"kv:{short_name(name[3:])}"
    row = BY_NAME.get(name)
    return row.short_name if row else name.partition(":")[2] or name


def unrounded(name: str) -> str:
    """Return the name of a format without its rounding: `int4@g32` for `int4@g32:gptq`. Any other name is returned unchanged."""
    row = BY_NAME.get(name)
    return name.removesuffix(f":{row.rounding}") if row is not None and row.rounding else name


def has_rounding(name: str) -> bool:
    """Return whether a dtype has a rounding, as `int4@g32:gptq` has."""
    row = BY_NAME.get(name)
    return row is not None and bool(row.rounding)


def rounded(name: str, rounding: str) -> str | None:
    """Return the name of a format with a rounding, such as `int4@g32:gptq`, or None if the dtype does not take the rounding."""
    found = f"{name}:{rounding}"
    row = BY_NAME.get(found)
    return found if row is not None and row.rounding == rounding else None


def with_rounding(name: str) -> str | None:
    """Return the name of a dtype if it has a rounding, otherwise with the best that it takes: GPTQ, or else that by an imatrix.
    None if it takes none.
    """
    return name if has_rounding(name) else rounded(name, "gptq") or rounded(name, "imatrix")


def rounded_formats(rounding: str) -> tuple[str, ...]:
    """Return the names of the formats that take a rounding, without it."""
    return tuple(unrounded(name) for name in CASTABLE_DTYPES if BY_NAME[name].rounding == rounding)


def parse_target(text: str) -> str:
    """Parse the dtype of a cast (`bf16`, `torch.bfloat16`, `half`, `mxfp4:floor`, `fp8:gptq`, `stored`).

    Returns a name in `CASTABLE_DTYPES`, or `STORED`. Raises UserError, with the nearest name, for anything else.
    """
    whole = text.strip().lower().removeprefix("torch.")
    if (found := _named(whole)) is not None:
        return found
    plain, _, word = whole.rpartition(":")
    rounding = next((each.name for each in ROUNDINGS.values() if word in (each.name, each.short)), None)
    if not plain or rounding is None:
        raise UserError(_why_unknown(text.strip(), whole))
    if (unrounded_name := _named(plain)) is None:
        raise UserError(_why_unknown(plain, plain))
    if (found := rounded(unrounded_name, rounding)) is None:
        takes = ", ".join(rounded_formats(rounding))
        raise UserError(f"{unrounded_name} does not take the rounding :{rounding}, which is for {takes}")
    return found


def _names() -> dict[str, str]:
    """Return the dtypes of a cast by all their names, without the other words for scales (`@t`)."""
    return (
        _ALIASES
        | {BY_NAME[name].short_name: name for name in CASTABLE_DTYPES}
        | {name: name for name in CASTABLE_DTYPES}
        | {STORED: STORED}
    )


def _named(whole: str) -> str | None:
    names = _names()
    word, at, scale = whole.partition("@")
    if whole in names:
        return names[whole]
    if at and word in names and names[word] in PER_CHANNEL_SCALES and scale in _SCALES:
        found = names[word] + _SCALES[scale]
        return found if found in BY_NAME else None
    return None


def _why_unknown(text: str, whole: str) -> str:
    """Return a sentence about a text that is no dtype of a cast. whole: the text in lower case."""
    names, every = _names(), ", ".join(UNROUNDED_DTYPES)
    word, at, _ = whole.partition("@")
    near = nearest(whole, names, cutoff=0.8) if ":" in whole else None
    if near is not None:
        return f"unknown dtype {text!r}: did you mean {near}?"
    formats = [name for name in UNROUNDED_DTYPES if name not in (*COMPUTE_DTYPES, *WHOLE_SCALE_DTYPES)]
    variants = [name for name in formats if word and name.startswith((f"{word}@", f"{word}:", f"{word}_"))]
    if at and word in names:
        also = f", and blocks as in {' or '.join(variants)}" if variants else ""
        return f"unknown dtype {text!r}: only {', '.join(PER_CHANNEL_SCALES)} have scales, @channel or @tensor{also}"
    if word in BY_NAME and not variants:
        return f"can't cast to {word}: weights may be {every}, or {STORED}"
    variants = variants or [name for name in (*COMPUTE_DTYPES, *PER_CHANNEL_SCALES) if word and name.startswith(word)]
    likely = " or ".join(variants) or (nearest(whole, names, cutoff=0.5) if word else None)
    hint = f"did you mean {likely}?" if likely else f"use one of {every}, or {STORED}"
    return f"unknown dtype {text!r}: {hint}"


def completions(begun: str) -> list[str]:
    """Return completions for a partly typed dtype: short names if any match, otherwise full names. Formats with a rounding are
    among them once the format is typed in full.
    """
    whole = begun.strip().lower()
    roundings = ":" in whole or _named(whole) is not None
    offered = CASTABLE_DTYPES if roundings else UNROUNDED_DTYPES
    known = [typed for name in offered if (typed := _typed(name)).startswith(whole)]
    return known or [name for name in (*offered, STORED) if name.startswith(whole)]


def _typed(name: str) -> str:
    """Return the name of a dtype as a user would type it: short, apart from those of block formats and of roundings."""
    plain, rounding = unrounded(name), BY_NAME[name].rounding
    if plain not in BY_NAME:
        return name
    word = plain if plain in BLOCK_FORMATS else BY_NAME[plain].short_name
    return f"{word}:{rounding}" if rounding else word


def has_channel_scales(shape: Sequence[int], dtype: str) -> bool:
    """Return whether a tensor gets one scale per output channel (its first dimension) in a format with scales."""
    row = BY_NAME[dtype]
    by_channel = row.scales == "channel" or (row.scales == "row" and len(shape) == 2)
    return len(shape) >= 2 and by_channel and row.blocks is None and row.llama is None


def scale_count(shape: Sequence[int], dtype: str) -> int:
    """Return how many scales a tensor has in a format with scales, not counting NVFP4's additional tensor scale."""
    blocks = BY_NAME[dtype].blocks
    if blocks is not None:
        return math.prod(scale_grid(shape, blocks))
    if BY_NAME[dtype].scales == "row" and len(shape) > 2:
        return math.prod(shape[:-1])
    return shape[0] if has_channel_scales(shape, dtype) else 1


def padded(shape: Sequence[int], dtype: str) -> bool:
    """Return whether the last blocks of a tensor are smaller than the others in the format `dtype`."""
    row = BY_NAME.get(dtype)
    return row is not None and row.blocks is not None and not divides(shape, row.blocks)


def quantizes_activations(dtype: str) -> bool:
    """Return whether runtimes that serve weights in this format also round the activations that these multiply: to this format or,
    for a type of llama.cpp, to 8 bits (`LlamaType.inputs`). They do not for integers in groups and in `int8@row`.
    """
    row = BY_NAME.get(dtype)
    return row is not None and dtype in STORAGE_DTYPES and not row.weight_only


def block_words(dtype: str) -> str:
    """Return a short description of a format's blocks and scales for the user, or "" for a dtype without blocks."""
    row = BY_NAME.get(dtype)
    if row is not None and row.llama is not None:
        return f"{row.llama.block} in a row, {row.llama.bits_per_weight:g} bits for each value with their scales"
    blocks = row.blocks if row is not None else None
    if blocks is None:
        return ""
    size = f"{blocks.rows} x {blocks.columns}" if blocks.rows > 1 else f"{blocks.columns} in a row"
    scale = "an exponent (E8M0)" if blocks.scale in ("uint8", "float8_e8m0fnu") else short_name(blocks.scale)
    more = ", a float32 for the tensor" if blocks.tensor_scale else ", a zero point" if blocks.zero_points else ""
    return f"{size}, each with a scale: {scale}{more}"


def nbytes_in(shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of a tensor in a file after a cast to `dtype`, scales included and codes packed. If the tensor can't have a
    type of llama.cpp, they are those of the type that replaces it.
    """
    row = BY_NAME[dtype]
    if row.llama is not None:
        of_shape = BY_NAME[fitted(dtype, shape)]
        return nbytes_of(shape, of_shape.llama) if of_shape.llama is not None else math.prod(shape) * of_shape.bits // 8
    if row.blocks is not None:
        return sum(part.nbytes for part in parts(shape, row.blocks, row.bits, row.torch_name))
    codes = math.prod(shape) * row.bits // 8
    return codes + SCALE_BYTES * scale_count(shape, dtype) if dtype in STORAGE_DTYPES else codes


def widest(stored: Iterable[str]) -> str:
    """Return the smallest compute dtype that holds all values of the compute dtypes in `stored`, float32 if `stored` has none."""
    stored_floats = {dtype for dtype in stored if dtype in COMPUTE_DTYPES}
    if not stored_floats:
        return "float32"
    if stored_floats >= {"bfloat16", "float16"}:
        stored_floats.add("float32")
    return next(name for name in COMPUTE_DTYPES if name in stored_floats)
