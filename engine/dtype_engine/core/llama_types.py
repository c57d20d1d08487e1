"""llama.cpp's own types: their blocks and bytes, and what llama-quantize stores where a tensor can't have them.

A row of values is divided into blocks of 32 or 256. llama.cpp's `ggml-common.h` defines the bytes of a block; the package `libgguf`
has llama.cpp's reference code, by which `runtime/formats/llama_blocks.py` computes them. llama-quantize leaves vectors and some
small matrices in float32, and falls back to another type where the blocks do not divide a row (`tensor_allows_quantization` and
`tensor_type_fallback` in `llama-quant.cpp`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

IMATRIX = "imatrix"
"""The rounding that weights the errors of a block's values by the mean squares of their inputs, as llama.cpp's imatrix does."""


ONLY_GGUF = "only GGUF files have it, for which `recipe convert --to llama.cpp` writes what llama-quantize reads"
"""Why nothing else stores a type, after words that name it."""

InputType = Literal["q8_0", "q8_1", "q8_k"]
"""A type to which llama.cpp rounds activations."""
INPUT_BLOCKS: Mapping[str, int] = {"q8_0": 32, "q8_1": 32, "q8_k": 256}
"""The number of values in a block of each `InputType`."""


class LlamaType(msgspec.Struct, frozen=True):
    """One type of llama.cpp."""

    name: str
    """Its name in a rule and, apart from case, in llama.cpp."""
    kind: int
    """Its number in GGUF files (`ggml_type`)."""
    bits: int
    """The bits of a value's code, without the scales."""
    block: int
    """The number of values in a block."""
    nbytes: int
    """The bytes of a block."""
    imatrix: Literal["unused", "used", "needed"]
    """What llama-quantize does with an imatrix: it ignores it, uses it, or refuses the type without one."""
    inputs: InputType
    """The type to which llama.cpp's CPU code rounds the activations that such a weight multiplies (`vec_dot_type`)."""
    fallback: str = ""
    """The type that replaces this one if `block` does not divide a row. "": float16, which also replaces a `fallback` that fits no
    better.
    """

    @property
    def bits_per_weight(self) -> float:
        return self.nbytes * 8 / self.block


LLAMA_TYPES = {
    row.name: row
    for row in (
        LlamaType("q8_0", 8, 8, 32, 34, "unused", "q8_0"),
        LlamaType("q6_k", 14, 6, 256, 210, "used", "q8_k", "q8_0"),
        LlamaType("q5_k", 13, 5, 256, 176, "used", "q8_k", "q5_1"),
        LlamaType("q4_k", 12, 4, 256, 144, "used", "q8_k", "q5_0"),
        LlamaType("q3_k", 11, 3, 256, 110, "used", "q8_k", "q4_0"),
        LlamaType("q2_k", 10, 2, 256, 84, "used", "q8_k", "q4_0"),
        LlamaType("iq4_nl", 20, 4, 32, 18, "used", "q8_0"),
        LlamaType("iq4_xs", 23, 4, 256, 136, "used", "q8_k", "iq4_nl"),
        LlamaType("iq3_s", 21, 3, 256, 110, "used", "q8_k", "iq4_nl"),
        LlamaType("iq3_xxs", 18, 3, 256, 98, "needed", "q8_k", "iq4_nl"),
        LlamaType("iq2_s", 22, 2, 256, 82, "needed", "q8_k", "iq4_nl"),
        LlamaType("iq2_xs", 17, 2, 256, 74, "needed", "q8_k", "iq4_nl"),
        LlamaType("iq2_xxs", 16, 2, 256, 66, "needed", "q8_k", "iq4_nl"),
        LlamaType("q4_0", 2, 4, 32, 18, "used", "q8_0"),
        LlamaType("q4_1", 3, 4, 32, 20, "used", "q8_1"),
        LlamaType("q5_0", 6, 5, 32, 22, "used", "q8_0"),
        LlamaType("q5_1", 7, 5, 32, 24, "used", "q8_1"),
        LlamaType("tq1_0", 34, 2, 256, 54, "unused", "q8_k", "q4_0"),
        LlamaType("tq2_0", 35, 2, 256, 66, "unused", "q8_k", "q4_0"),
    )
}
"""All types, the most usual first. llama.cpp's `mxfp4` is `mxfp4:floor` here."""

BY_DTYPE = {
    name: row
    for row in LLAMA_TYPES.values()
    for name in (row.name, f"{row.name}:{IMATRIX}")
    if name == row.name or row.imatrix != "unused"
}
"""The types by their names in rules, with `:imatrix` where llama-quantize uses one."""
LLAMA_DTYPES = tuple(name for name, row in BY_DTYPE.items() if row.imatrix != "needed" or name != row.name)
"""The names in rules. A type that needs an imatrix can't be named without."""

_KEPT = re.compile(
    r"norm\w*\.weight$|(^|\.)(gate|router|wg)\.weight$|(^|\.)conv1d\.weight$|(^|\.)(wpe|embed_positions)\.weight$"
    r"|(position|token_type)_embeddings\.weight$|relative_attention_bias\.weight$|altup|laurel|per_layer_model_projection"
)
"""Matches names in transformers of the matrices that llama-quantize never quantizes."""


def llama_type(dtype: str) -> LlamaType | None:
    """Return the type of llama.cpp that a dtype names, with or without `:imatrix`, or None for any other dtype."""
    return BY_DTYPE.get(dtype)


def fitted(dtype: str, shape: Sequence[int], name: str = "") -> str:
    """Return the dtype that llama-quantize gives a tensor instead of `dtype`, a type of llama.cpp: `dtype` itself if the tensor can
    have it, float32, or a type with smaller blocks. Any other dtype is returned unchanged. name: the tensor's name, by which some
    matrices keep float32.
    """
    row = llama_type(dtype)
    if row is None:
        return dtype
    if not any(size > 1 for size in shape[:-1]) or _KEPT.search(name):
        return "float32"
    if shape[-1] % row.block == 0:
        return dtype
    other = LLAMA_TYPES.get(row.fallback)
    if other is None or shape[-1] % other.block:
        return "float16"
    rounded = f"{other.name}:{IMATRIX}"
    return rounded if dtype != row.name and rounded in BY_DTYPE else other.name


def nbytes_of(shape: Sequence[int], row: LlamaType) -> int:
    """Return the bytes of a tensor whose rows `row.block` divides."""
    count = 1
    for size in shape:
        count *= size
    return count // row.block * row.nbytes
