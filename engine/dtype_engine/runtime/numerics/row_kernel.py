"""All sums that the figures of two outputs need, row by row, in one go: on the CPU, by machine code."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from dtype_engine.runtime.numerics.machine_code import SMALLEST_EXPONENT, Code
from dtype_engine.runtime.numerics.row_function import RowFunction
from dtype_engine.runtime.numerics.row_function import is_available as can_make_code

FARTHEST = 30.0
"""The largest |x| of which e^x is taken."""
_SUMS = ("absolute", "noise", "moved")
_SUMS_OF_DISTRIBUTION = ("first", "rest")
_REST_TERMS = 9
"""Terms of Taylor's series of (e^x - 1 - x) / x² for |x| <= 1; those left out are below 2^-24."""
_LOCK = threading.Lock()


@dataclass(frozen=True)
class RowSums:
    """Of each row, float64 [rows] where nothing else is said, with δ = c - r, p = e^(r - largest r), x = δ - shift.

    absolute: Σ|δ|. noise: Σδ²; not finite where r or c is not. moved: Σrδ. largest: the largest |δ|. Of logits also first: Σpx;
    rest: Σp(e^x - 1 - x), if no |x| is above `FARTHEST`; top: the first of the likeliest classes of c, int64.
    """

    absolute: np.ndarray
    noise: np.ndarray
    moved: np.ndarray
    first: np.ndarray
    rest: np.ndarray
    largest: np.ndarray
    top: np.ndarray


class RowKernel:
    """Takes the sums of rows of outputs of two dtypes. Threads may call it side by side."""

    def __init__(self, reference: torch.dtype, candidate: torch.dtype, distribution: bool) -> None:
        self._names = _SUMS + _SUMS_OF_DISTRIBUTION if distribution else _SUMS
        self._function = RowFunction(_code(reference, candidate, self._names))

    @staticmethod
    def is_available(*dtypes: torch.dtype) -> bool:
        """Whether there is code for these dtypes on this machine."""
        return can_make_code(*dtypes)

    @staticmethod
    def of(reference: torch.dtype, candidate: torch.dtype, distribution: bool) -> RowKernel:
        """The kernel for outputs of these dtypes, for which it `is_available`. Made once."""
        with _LOCK:
            return _kernel(reference, candidate, distribution)

    def sums(
        self, reference: torch.Tensor, candidate: torch.Tensor, largest: torch.Tensor, shift: torch.Tensor
    ) -> RowSums:
        """Of rows of outputs [rows, width]; `largest` r and `shift` of each are float32 [rows], and mean nothing where the outputs
        are no distributions. All of torch's threads work at it.
        """
        count, width = reference.shape
        reference, candidate = (each if each.stride(1) == 1 else each.contiguous() for each in (reference, candidate))
        sums = torch.empty(count, len(self._names), dtype=torch.float64)
        differences, logits = torch.empty(count), torch.empty(count)
        classes = torch.empty(count, dtype=torch.int32)
        sizes = reference.stride(0), candidate.stride(0), width
        self._function((reference, candidate, largest, shift), sizes, (sums, differences, logits, classes))
        of_names = dict(zip(self._names, sums.numpy().T, strict=True))
        zeros = np.zeros(count)
        return RowSums(
            **{name: of_names.get(name, zeros) for name in _SUMS + _SUMS_OF_DISTRIBUTION},
            largest=differences.numpy().astype(np.float64),
            top=classes.numpy().astype(np.int64),
        )


@cache
def _kernel(reference: torch.dtype, candidate: torch.dtype, distribution: bool) -> RowKernel:
    return RowKernel(reference, candidate, distribution)


def _code(reference: torch.dtype, candidate: torch.dtype, names: tuple[str, ...]) -> Code:
    code = Code(read=4, sizes=3, written=4)
    of_reference, of_candidate, largest_logits, shifts = code.read
    reference_stride, candidate_stride, width = code.sizes
    sums, differences, logits, classes = code.written
    b, difference = code.b, code.variable()
    with code.counting(code.first, code.end, 1) as row:
        code.begin_sums(*names)
        b.store(code.all(0.0), difference)
        likeliest = code.begin_largest()
        largest, shift = code.of_row(largest_logits, row), code.of_row(shifts, row)

        def take(values: list[Any], at: Any, valid: Any) -> None:
            r, c = values
            delta = b.fsub(c, r)
            absolute = code.call("fabs", delta)
            code.add("absolute", absolute)
            code.add("noise", delta, delta)
            code.add("moved", r, delta)
            b.store(code.larger(absolute, b.load(difference)), difference)
            if "first" in names:
                code.note_largest(likeliest, c, at, valid)
                p = code.exp(code.larger(b.fsub(r, largest), code.all(SMALLEST_EXPONENT)))
                _take_of_distribution(
                    code, p if valid is None else b.select(valid, p, code.all(0.0)), b.fsub(delta, shift)
                )

        rows = (
            (code.row_of(of_reference, row, reference_stride, reference), reference),
            (code.row_of(of_candidate, row, candidate_stride, candidate), candidate),
        )
        code.go_over(rows, width, take)
        code.keep_sums(row, sums)
        code.keep_largest_lane(b.load(difference), row, differences)
        code.keep_largest(likeliest, row, logits, classes)
    return code


def _take_of_distribution(code: Code, p: Any, x: Any) -> None:
    """Add px and p(e^x - 1 - x): by its series, where that would cancel, else from e^x."""
    b, rest = code.b, code.variable()
    px = b.fmul(p, x)
    code.add("first", px)
    b.store(b.fmul(px, b.fmul(x, code.series(x, _REST_TERMS, 2))), rest)
    is_far = b.fcmp_ordered(">", code.call("fabs", x), code.all(1.0))
    with b.if_then(code.any_of(is_far), likely=False):
        in_range = code.larger(code.smaller(x, code.all(FARTHEST)), code.all(-FARTHEST))
        far = b.fsub(b.fsub(code.exp(in_range), code.all(1.0)), x)
        b.store(b.select(is_far, b.fmul(p, far), b.load(rest)), rest)
    code.add("rest", b.load(rest))
