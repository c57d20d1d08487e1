"""AWQ's three layouts with 4 bits, as AutoAWQ, GPTQModel and AutoRound write them. An int32 word holds eight codes. `x` is a layer.

"gemm": `x.qweight` [in, out / 8] holds the codes. A word holds the codes of eight outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7 from
the lowest bits on. `x.qzeros` [groups, out / 8] holds zero points, which are packed in the same way. `x.scales` [groups, out] holds
a scale for each group and output.

"gemv": `x.qweight` [out, in / 8] holds the codes. A word holds the codes of eight successive inputs. `x.qzeros` [out, words] holds
a zero point for each group, and `x.scales` [out, 8 * words] holds a scale for each group. Both are padded, so they may have more
entries in a row than the weight has groups.

"gemv_fast", also of llm-awq: `x.qweight` [out / 4, in] holds words of 16 bits, in the order of a CUDA kernel (see
`runtime/formats/schemes/awq.py`). `x.scales` and `x.qzeros` or `x.scaled_zeros`, padded to [8 * words, out], hold a scale and an
offset for each group and output. The offset is added: it is the negative product of the zero point and the scale.

The shapes tell which layout a weight has.
"""

from __future__ import annotations

from typing import Any

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import (
    block_name,
    declared,
    declared_numbers,
    group_size,
    quant_method,
)
from dtype_engine.checkpoint.schemes.layout import Config, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import FLOATS, packed_words
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Declared, Metadata, Scheme, Weights

_GEMM = {"layout": "gemm", "code": "row words", "order": (0, 2, 4, 6, 1, 3, 5, 7), "signed": False}


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    settings = declared(config)
    method = quant_method(settings)
    rounded = method == "auto-round" and settings.get("packing_format") in ("auto_round:auto_awq", "auto_round:awq")
    if (method != "awq" and not rounded) or 4 not in declared_numbers(settings, "bits"):
        return
    sizes = declared_numbers(settings, "group_size")
    for stem, codes, scale, zero in packed_words(tensors):
        if (codes.dtype, zero.dtype) != ("int32", "int32") or not codes.nbytes:
            continue
        if (layout := _layout(codes, scale, zero, sizes)) is not None:
            packing, rows, columns, size = layout
            form, packing = f"{method}:int4@{block_name(size, columns)}", {"block": (1, size), **packing}
            parts = {CODES: codes, "scale": scale, "zero_point": zero}
            yield CodedWeight(f"{stem}weight", (rows, columns), SCHEME, form, parts, packing)
    yield from _read_fast(tensors, method, sizes)


def _read_fast(tensors: Tensors, method: str, sizes: set[int]) -> Weights:
    for name, codes in tensors.items():
        stem = name.removesuffix("qweight")
        scale, offset = tensors.get(f"{stem}scales"), tensors.get(f"{stem}qzeros", tensors.get(f"{stem}scaled_zeros"))
        if stem == name or codes.dtype != "int16" or scale is None or offset is None:
            continue
        if not {scale.dtype, offset.dtype} <= set(FLOATS) or len(codes.shape) != 2 or scale.shape != offset.shape:
            continue
        rows, columns = 4 * codes.shape[0], codes.shape[1]
        size = _padded_size(sizes, columns, scale.shape[0]) if scale.shape[1:] == (rows,) and not columns % 64 else None
        if size is not None:
            form = f"{method}:int4@{block_name(size, columns)}"
            parts = {CODES: codes, "scale": scale, "offset": offset}
            settings = {"block": (1, size), "layout": "gemv fast"}
            yield CodedWeight(f"{stem}weight", (rows, columns), SCHEME, form, parts, settings)


def _padded_size(sizes: set[int], columns: int, places: int) -> int | None:
    """Return the declared group size for which a row of `columns` values has `places` scales including padding, or None."""
    for size in sorted(sizes):
        if size > 0 and columns % size == 0 and 0 <= places - columns // size < 8 * max(128 // size, 1):
            return size
    return None


def _layout(
    codes: CheckpointTensor, scale: CheckpointTensor, zero: CheckpointTensor, sizes: set[int]
) -> tuple[dict[str, Any], int, int, int] | None:
    """Return (settings, rows, columns, columns of a group) of a weight, or None if the shapes fit no layout of AWQ. sizes: the
    declared group sizes.
    """
    (columns, words), (groups, rows) = codes.shape, scale.shape
    if rows == 8 * words and zero.shape == (groups, words):
        size = group_size(sizes, columns, groups)
        return (_GEMM, rows, columns, size) if size is not None and columns % size == 0 else None
    (rows, words), (_, places) = codes.shape, scale.shape
    columns = 8 * words
    if zero.shape == (rows, places / 8) and scale.shape[0] == rows:
        size = _padded_size(sizes, columns, places)
        return ({"layout": "gemv"}, rows, columns, size) if size is not None else None
    return None


def _covers(settings: Config) -> bool:
    version = str(settings.get("version") or "gemm").lower()
    return quant_method(settings) == "awq" and settings.get("bits") == 4 and version in ("gemm", "gemv", "gemv_fast")


SCHEME = Scheme(
    "awq", "awq", _read, settings_files=("quant_config.json",), ignored=("modules_to_not_convert",), ignored_by=("awq",),
    declared=Declared(_covers, needs_codes=lambda settings: quant_method(settings) == "awq"),
)  # fmt: skip
"""AWQ's tensors have the names of GPTQ's tensors, so the layout of GPTQ describes both."""
