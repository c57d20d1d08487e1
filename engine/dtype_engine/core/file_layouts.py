"""Layouts of files in which an export can store weights with codes and scales.

In `compressed-tensors`, the first, the tensors are those of `block_formats.parts`, and formats that it lacks have a layout of this
program alone. The others hold fewer formats. `runtime/export/file_layout.py` writes them, and `runtime/verify/file_layout.py` reads
them to verify an export. diffusers reads `TORCHAO` alone, so its models have no other (`runtime/export/torchao_files.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from dtype_engine.core import dtypes
from dtype_engine.core.block_formats import Blocks, Part

_WORD = 32
_BITS = (2, 4, 8)
"""The widths of codes of which a word holds a whole number, and which programs read in GPTQ's layout."""


class FileLayout(msgspec.Struct, frozen=True):
    """One layout of files."""

    name: str
    words: str
    """What it is, for the user."""
    parts: Callable[[Sequence[int], str], tuple[Part, ...]]
    """A function of (the shape of a linear layer's weight, a format that the layout holds) that returns the weight's tensors: the
    codes, the scales, and then the others. Each suffix follows the name of the layer and a dot.
    """
    refusal: Callable[[Sequence[int], str], str]
    """A function of (shape, format) that returns why the layout can't hold the weight of a linear layer, or ""."""
    subtracted: int = 0
    """What is subtracted from each zero point before it is stored."""
    packed: bool = True
    """Whether the codes are in words. If not, the tensors hold the values of those of compressed-tensors, under other names."""


def _gptq_parts(shape: Sequence[int], dtype: str) -> tuple[Part, ...]:
    """Return the tensors of GPTQ's layout, which GPTQModel has in `gptqmodel/nn_modules/qlinear/__init__.py`: codes
    [in * bits / 32, out], scales [groups, out], zero points [groups, out * bits / 32], and the group of each input [in].
    """
    outputs, inputs = shape
    bits, groups = dtypes.BY_NAME[dtype].bits, inputs // _blocks(dtype).columns
    return (
        _part("qweight", "int32", (inputs * bits // _WORD, outputs)),
        _part("scales", "float16", (groups, outputs)),
        _part("qzeros", "int32", (groups, outputs * bits // _WORD)),
        _part("g_idx", "int32", (inputs,)),
    )


def _part(suffix: str, dtype: str, shape: tuple[int, ...]) -> Part:
    return Part(suffix, dtype, shape, math.prod(shape) * dtypes.BY_NAME[dtype].bits // 8)


def _blocks(dtype: str) -> Blocks:
    blocks = dtypes.BY_NAME[dtype].blocks
    assert blocks is not None, dtype
    return blocks


def _gptq_refusal(shape: Sequence[int], dtype: str) -> str:
    row = dtypes.BY_NAME[dtype]
    if row.blocks is None or row.blocks.packing != "words" or row.bits not in _BITS:
        return "it holds integers in groups alone, such as int4@g128 and int8@g128"
    per_word = _WORD // row.bits
    if shape[0] % per_word:
        return f"its zero points are packed by {per_word} outputs, and the layer has {shape[0]}"
    return ""


def _first_gptq_refusal(shape: Sequence[int], dtype: str) -> str:
    blocks = dtypes.BY_NAME[dtype].blocks
    if blocks is not None and blocks.zero_points:
        return "programs differ in how they read its zero points; gptq_v2 holds them"
    return _gptq_refusal(shape, dtype)


def _torchao_parts(shape: Sequence[int], dtype: str) -> tuple[Part, ...]:
    """Return the tensors of torchao's layout for `Int8Tensor` and `Float8Tensor` (`flatten_tensor_state_dict` in
    `torchao/prototype/safetensors/safetensors_support.py`): codes [out, in], scales [out, 1], or [1, 1] for the whole weight.
    """
    row = dtypes.BY_NAME[dtype]
    scales = (1 if row.per_tensor else shape[0], 1)
    return _part("_weight_qdata", row.torch_name, tuple(shape)), _part("_weight_scale", "float32", scales)


def _torchao_refusal(shape: Sequence[int], dtype: str) -> str:
    return "" if dtypes.BY_NAME[dtype].blocks is None else "it holds one scale for each output or for the whole weight"


COMPRESSED_TENSORS = "compressed-tensors"
"""The layout of an export unless another is named."""
TORCHAO = FileLayout("torchao", "torchao's layout", _torchao_parts, _torchao_refusal, packed=False)
"""The layout of every export that diffusers loads."""
FILE_LAYOUTS = {
    each.name: each
    for each in (
        FileLayout("gptq", "GPTQ's layout, for symmetric formats", _gptq_parts, _first_gptq_refusal, subtracted=1),
        FileLayout("gptq_v2", "its second version, also for zero points", _gptq_parts, _gptq_refusal),
    )
}
"""The other layouts by name."""
