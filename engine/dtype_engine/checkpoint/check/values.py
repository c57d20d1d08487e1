"""Reads the bytes of tensors in chunks, to find scales and values that are invalid, and tensors that are constant or equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtype_engine.checkpoint.safetensors_header import ByteRange, CheckpointTensor
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import open_regular, reading

if TYPE_CHECKING:
    import numpy

    Codes = numpy.ndarray[Any, numpy.dtype[Any]]

_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ScaleCounts:
    """How many scales in a tensor are NaN, infinite, zero and negative."""

    nan: int = 0
    infinite: int = 0
    zero: int = 0
    negative: int = 0

    def text(self, elements: int) -> str:
        """Return the counts in words, as in `holds 128 scales, of which 3 are NaN and 1 is zero` for 128 elements, "" if all
        are 0.
        """
        named = {"NaN": self.nan, "infinite": self.infinite, "zero": self.zero, "negative": self.negative}
        parts = [f"{count:,} {'is' if count == 1 else 'are'} {name}" for name, count in named.items() if count]
        return f"holds {elements:,} scales, of which {' and '.join(parts)}" if parts else ""


def pieces(where: ByteRange, nbytes: int = _PIECE_BYTES) -> Iterator[bytes]:
    """Yield the bytes of a range of a file in chunks of `nbytes`. Raises UserError if the file can't be read or is too short."""
    with reading(where.file), open_regular(where.file) as file:
        file.seek(where.start)
        left = where.nbytes
        while left > 0:
            piece = file.read(min(nbytes, left))
            if not piece:
                raise UserError(f"{where.file} was cut short while it was read; open the model again")
            left -= len(piece)
            yield piece


def count_scales(tensor: CheckpointTensor, exponents: bool) -> ScaleCounts | None:
    """Return the numbers of NaN, infinite, zero and negative scales, or None if the tensor's bytes can't be read as values.
    exponents: whether each byte is the exponent of a power of two (E8M0), where 255 means NaN.
    """
    import numpy as np

    where = tensor.bytes
    if where is None:
        return None
    total = np.zeros(4, np.int64)
    for piece in pieces(where):
        if exponents or tensor.dtype == "float8_e8m0fnu":
            total[0] += int((np.frombuffer(piece, np.uint8) == 255).sum())
            continue
        if (split := _magnitudes_and_signs(piece, tensor.dtype)) is None:
            return None
        magnitude, sign, largest = split
        total += [
            int((magnitude > largest).sum()),
            int((magnitude == largest).sum()) if _has_infinity(tensor.dtype) else 0,
            int((magnitude == 0).sum()),
            int((sign & (magnitude > 0) & (magnitude <= largest)).sum()),
        ]
    return ScaleCounts(*(int(each) for each in total))


def integer_range(tensor: CheckpointTensor) -> tuple[int, int] | None:
    """Return the smallest and the largest value of an int32 or int64 tensor. None for an empty tensor or another dtype."""
    import numpy as np

    where = tensor.bytes
    if where is None or not where.nbytes or tensor.dtype not in ("int32", "int64"):
        return None
    ranges = []
    for piece in pieces(where):
        values = np.frombuffer(piece, np.dtype(f"<i{int(tensor.dtype[3:]) // 8}"))
        ranges.append((int(values.min()), int(values.max())))
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _has_infinity(dtype: str) -> bool:
    return dtype in dtypes.COMPUTE_DTYPES or dtype == "float8_e5m2"


def _magnitudes_and_signs(piece: bytes, dtype: str) -> tuple[Codes, Codes, int] | None:
    """Return (magnitudes, signs, limit) of raw floating-point values, or None for an unsupported dtype. A magnitude is the bits of
    a value without the sign, as an integer; a sign is True for a negative value. Magnitudes above the limit are NaN. The limit is
    the magnitude of infinity or, in a dtype without infinity, of the largest value.
    """
    import numpy as np

    row = dtypes.BY_NAME.get(dtype)
    if row is None or not (_has_infinity(dtype) or dtype == "float8_e4m3fn"):
        return None
    codes = np.frombuffer(piece, np.dtype(f"<u{row.bits // 8}"))
    top = codes.dtype.type(1 << (row.bits - 1))
    largest = ((1 << row.exponent) - 1) << row.mantissa if _has_infinity(dtype) else 0x7E
    return codes & (top - codes.dtype.type(1)), codes >= top, largest


def find_bad_values(tensor: CheckpointTensor, on_bytes: Callable[[int], None]) -> tuple[int, bool] | None:
    """Return (number of values that are NaN or infinite, whether all values are equal), or None if the tensor is empty or can't be
    read. on_bytes: called with the number of bytes of each chunk that was read.
    """
    import numpy as np

    where, row = tensor.bytes, dtypes.BY_NAME.get(tensor.dtype)
    if where is None or row is None or row.bits < 8 or not where.nbytes:
        return None
    width = row.bits // 8
    bad, first, constant = 0, b"", True
    for piece in pieces(where):
        if (split := _magnitudes_and_signs(piece, tensor.dtype)) is not None:
            magnitude, _, largest = split
            bad += int((magnitude >= largest).sum() if _has_infinity(tensor.dtype) else (magnitude > largest).sum())
        first = first or piece[:width]
        if constant:
            values = np.frombuffer(piece, np.dtype(f"V{width}"))
            constant = bool((values.view(np.uint8).reshape(-1, width) == np.frombuffer(first, np.uint8)).all())
        on_bytes(len(piece))
    return bad, constant


def same_bytes(one: CheckpointTensor, other: CheckpointTensor) -> bool | None:
    """Return whether two tensors agree in dtype, shape and every bit, or None if their bytes can't be read."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.bytes is None or other.bytes is None:
        return None
    return all(left == right for left, right in zip(pieces(one.bytes), pieces(other.bytes), strict=True))
