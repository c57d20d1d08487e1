"""Compares the weights of two checkpoints, tensor by tensor, without a forward pass and without loading a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dtype_engine.checkpoint import ByteRange, Checkpoint, Watch, refuse_changed
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import ModelOptions
from dtype_engine.core.regular_files import reading
from dtype_engine.results.weights import DifferentShape, WeightDifference
from dtype_engine.runtime.building.pairing import Pair, Pairing, pair_weights
from dtype_engine.runtime.formats.row_blocks import parallel_map
from dtype_engine.runtime.numerics.compare.element_sums import ElementSums, element_sums
from dtype_engine.runtime.numerics.compare.metrics import relative_l2, sqnr_db
from dtype_engine.runtime.weights.checkpoint_weights import source_of
from dtype_engine.runtime.weights.pieces import Rows, as_matrix

_VALUES_AT_ONCE = 1 << 20
"""How many values of a weight, approximately, each thread holds in memory at once."""
_BYTES_AT_ONCE = 1 << 22
"""How many bytes of a file are read and compared at once."""
_UNLIKE_DB = 3.0
"""If the SQNR in dB is lower, other orders of the rows are tried. Weights rounded to 4 bits have over 15 dB."""
_LIKE_DB = 10.0
"""If the SQNR in dB is higher, two weights count as the same weight, possibly rounded."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some consecutive rows of a weight, which is read as a matrix."""

    matrix: Rows
    unit: int
    """The number of rows that are always read together."""
    first: int
    count: int

    @property
    def columns(self) -> int:
        return self.matrix.shape[1]

    def read(self, first: int, last: int) -> torch.Tensor:
        return self.matrix[self.first + first : self.first + last]


class TwoCheckpoints:
    """Compares the weights of two checkpoints of one architecture. Raises UserError if their weights can't be paired."""

    def __init__(self, reference: Checkpoint, candidate: Checkpoint, options: ModelOptions) -> None:
        self.reference = reference
        self.candidate = candidate
        self.pairing: Pairing = pair_weights(reference, candidate, options)
        """The pairs of the same weight in both checkpoints, and the weights that only one of the checkpoints has."""
        self._heads = _heads((reference.config, candidate.config))
        self._watch = Watch((*reference.identities, *candidate.identities))

    def differences(
        self,
        known: Mapping[tuple[str, str], WeightDifference],
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Iterator[WeightDifference | DifferentShape]:
        """Compare each weight that both checkpoints have, in pieces, and yield the difference, in the order of the reference's
        weights.

        known: differences from earlier runs, which are not computed again. The keys are (name of the weight in the reference
        checkpoint, its name in the candidate). `on_progress(done, total)` is called with numbers of compared bytes. Raises
        UserError if a file can't be read or has changed since it was opened.
        """
        sizes = [self.candidate.weights[pair.candidate].nbytes for pair in self.pairing.pairs]
        done, total = 0, sum(sizes)
        for pair, size in zip(self.pairing.pairs, sizes, strict=True):
            on_progress(done, total)
            self._watch.look()
            earlier = known.get((pair.reference, pair.candidate))
            yield self._difference(pair) if earlier is None else earlier
            done += size
        refuse_changed((*self.reference.identities, *self.candidate.identities))

    def _difference(self, pair: Pair) -> WeightDifference | DifferentShape:
        shapes = self.reference.weights[pair.reference].shape, self.candidate.weights[pair.candidate].shape
        if shapes[0] == shapes[1] and self._same_bytes(pair):
            return self._report(pair, shapes[0], ElementSums())
        sources = (
            source_of(self.reference, pair.reference, "copied"),
            source_of(self.candidate, pair.candidate, "copied"),
        )
        whole = [_Rows(matrix, unit, 0, matrix.shape[0]) for matrix, unit in map(as_matrix, sources)]
        counts = [each.count for each in whole]
        for index, part in enumerate((pair.reference_part, pair.candidate_part)):
            if part is not None:
                rows = whole[1 - index].count
                shape = sources[index].shape
                matrix = counts[index] // shape[0] if len(shape) > 2 else 0
                start = (part[0] or 0) * matrix + part[1] * rows
                whole[index] = replace(whole[index], first=start, count=rows)
                shapes = (sources[1 - index].shape,) * 2
                if start + rows > counts[index]:
                    return DifferentShape(pair.candidate, *(each.shape for each in sources))
        left, right = whole
        if shapes[0] != shapes[1] or left.columns != right.columns:
            return DifferentShape(pair.candidate, *(each.shape for each in sources))
        sums, order = _sums(left, right), ""
        if len(shapes[0]) > 1 and _sqnr(sums) < _UNLIKE_DB:
            sums, order = self._in_another_order(left, right, sums)
        return self._report(pair, tuple(shapes[0]), sums, order)

    def _in_another_order(self, left: _Rows, right: _Rows, sums: ElementSums) -> tuple[ElementSums, str]:
        """If the candidate has the reference's rows in a different order, return the errors summed over matching rows, and a phrase
        that says how the candidate orders them. Otherwise, return `sums` and "". left, right: the rows of the reference's and of
        the candidate's weight. sums: their errors in the stored order.
        """
        for heads in self._heads:
            if left.count % (2 * heads) == 0 and left.count > 2 * heads:
                turned = _sums(left, right, heads)
                if _sqnr(turned) > _LIKE_DB:
                    return turned, f"permuted as by llama.cpp, {heads} heads"
        if torch.equal(_hashes(left).sort().values, _hashes(right).sort().values):
            return ElementSums(elements=sums.elements), "permuted"
        return sums, ""

    def _same_bytes(self, pair: Pair) -> bool:
        """Return whether both checkpoints store a weight in the same format with the same bytes, so that its values are equal."""
        left, right = _stored(self.reference, pair.reference), _stored(self.candidate, pair.candidate)
        if left is None or right is None or left[0] != right[0] or len(left[1]) != len(right[1]):
            return False
        return all(map(_equal_ranges, left[1], right[1]))

    def _report(self, pair: Pair, shape: Sequence[int], sums: ElementSums, order: str = "") -> WeightDifference:
        elements = max(1, math.prod(shape))
        return WeightDifference(
            name=pair.candidate,
            reference_name=pair.reference,
            reference=self.reference.dtype(pair.reference),
            candidate=self.candidate.dtype(pair.candidate),
            shape=tuple(shape),
            equal=sums.max_abs == 0.0 and order != "permuted",
            sqnr_db=_sqnr(sums),
            max_abs=sums.max_abs,
            mean_abs=sums.sum_abs / elements,
            rel_l2=relative_l2(sums.energy, sums.noise),
            nonfinite=sums.nonfinite,
            rows=order,
        )


def _stored(checkpoint: Checkpoint, name: str) -> tuple[object, list[ByteRange]] | None:
    """Return how a checkpoint stores a weight (for example its format and shape), and the byte ranges of its tensors in the files.
    Two weights with equal formats and equal bytes have equal values. Returns None if a tensor's bytes are not contiguous in a file.
    """
    coded = checkpoint.coded.get(name)
    if coded is not None:
        form: object = coded.format, coded.shape, sorted(coded.parts), dict(coded.settings)
        tensors = [coded.parts[role] for role in sorted(coded.parts)]
    else:
        form, tensors = "values", [checkpoint.weights[name]]
    ranges = [tensor.bytes for tensor in tensors if tensor.bytes is not None]
    return ((form, [tensor.dtype for tensor in tensors]), ranges) if len(ranges) == len(tensors) else None


def _equal_ranges(one: ByteRange, other: ByteRange) -> bool:
    if one.nbytes != other.nbytes:
        return False
    with reading(one.file), open(one.file, "rb") as left, reading(other.file), open(other.file, "rb") as right:
        left.seek(one.start)
        right.seek(other.start)
        for start in range(0, one.nbytes, _BYTES_AT_ONCE):
            count = min(_BYTES_AT_ONCE, one.nbytes - start)
            if (piece := left.read(count)) != right.read(count):
                return False
            if len(piece) < count:
                raise UserError(f"{one.file} was cut short while it was read")
    return True


def _heads(configs: Sequence[Mapping[str, Any] | None]) -> list[int]:
    """Return the numbers of attention heads in the configurations, such as [32, 8] for 32 query heads and 8 key and value heads."""
    found = dict[int, None]()
    for config in configs:
        for part in (config or {}, *(each for each in (config or {}).values() if isinstance(each, dict))):
            for name in ("num_attention_heads", "num_key_value_heads", "n_head"):
                if type(value := part.get(name)) is int and value > 0:
                    found[value] = None
    return list(found)


def _sums(left: _Rows, right: _Rows, heads: int | None = None) -> ElementSums:
    """Compare two weights element by element. heads: the number of attention heads if the rows of `right` are in llama.cpp's order,
    which is undone first; otherwise None. In llama.cpp's order, row i of the first half of each head is followed by row i of the
    second half. (`LlamaModel.permute` of convert_hf_to_gguf.py.)
    """
    unit = max(left.unit, right.unit, left.count // heads if heads else 1)
    step = max(1, _VALUES_AT_ONCE // max(1, left.columns) // unit) * unit
    pieces = [(first, min(first + step, left.count)) for first in range(0, left.count, step)]
    found = [ElementSums()] * len(pieces)

    def work(numbers: Iterable[int]) -> None:
        for number in numbers:
            first, last = pieces[number]
            values = right.read(first, last)
            if heads:
                size = left.count // heads
                values = values.view(-1, size // 2, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
            found[number] = element_sums(_numbers(left.read(first, last)), _numbers(values))

    parallel_map(work, len(pieces))
    total = ElementSums()
    for sums in found:
        total.add(sums)
    return total


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """Return values as a tensor that torch can widen to float64: complex numbers as pairs, and packed float4 codes as bytes."""
    if values.is_complex():
        return torch.view_as_real(values)
    return values.view(torch.uint8) if values.dtype == torch.float4_e2m1fn_x2 else values


def _sqnr(sums: ElementSums) -> float:
    return sqnr_db(sums.energy, sums.noise)


def _hashes(rows: _Rows) -> torch.Tensor:
    """Return a hash of each row: int64 [rows], the sum modulo 2^64 of the bits of its float32 values times random odd numbers."""
    factors = torch.randint(-(1 << 62), 1 << 62, (rows.columns,), generator=torch.Generator().manual_seed(7))
    step = max(1, _VALUES_AT_ONCE // max(1, rows.columns))
    found = []
    for first in range(0, rows.count, step):
        values = _numbers(rows.read(first, min(first + step, rows.count))).to(torch.float32) + 0.0  # -0.0 becomes 0.0
        found.append((values.view(torch.int32).to(torch.int64) * (2 * factors + 1)).sum(1))
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def sorted_worst_first(found: Sequence[WeightDifference]) -> tuple[WeightDifference, ...]:
    """Return differences in the order of a report: the lowest SQNR first, and equal weights last."""
    return tuple(sorted(found, key=lambda each: (each.equal, each.sqnr_db)))
