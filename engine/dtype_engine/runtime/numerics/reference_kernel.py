"""What figures need of each row of a reference output, in one go: on the CPU, by machine code."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from dtype_engine.runtime.numerics.machine_code import SMALLEST_EXPONENT, Code
from dtype_engine.runtime.numerics.row_function import RowFunction

_LOCK = threading.Lock()


@dataclass(frozen=True)
class RowFigures:
    """Of each row, float64 [rows] where nothing else is said. energy: Σr²; not finite where r is not. Of logits also top: the first
    of the likeliest classes, int64; largest: its logit; total: Σ e^(r - largest).
    """

    energy: np.ndarray
    top: np.ndarray
    largest: np.ndarray
    total: np.ndarray


class ReferenceKernel:
    """Takes the figures of rows of outputs of one dtype. Threads may call it side by side."""

    def __init__(self, dtype: torch.dtype, distribution: bool) -> None:
        self._distribution = distribution
        self._function = RowFunction(_code(dtype, distribution))

    @staticmethod
    def of(dtype: torch.dtype, distribution: bool) -> ReferenceKernel:
        """The kernel for outputs of a dtype that code can be made for. Made once."""
        with _LOCK:
            return _kernel(dtype, distribution)

    def figures(self, output: torch.Tensor) -> RowFigures:
        """Of an output [rows, width]. All of torch's threads work at it."""
        count, width = output.shape
        output = output if output.stride(1) == 1 else output.contiguous()
        sums = torch.empty(count, 3 if self._distribution else 1, dtype=torch.float64)
        logits, classes = torch.empty(count), torch.empty(count, dtype=torch.int32)
        self._function((output,), (output.stride(0), width), (sums, logits, classes))
        energy, *of_logits = sums.numpy().T
        return RowFigures(
            energy,
            classes.numpy().astype(np.int64),
            logits.numpy().astype(np.float64),
            sum(of_logits, np.zeros(count)),
        )


@cache
def _kernel(dtype: torch.dtype, distribution: bool) -> ReferenceKernel:
    return ReferenceKernel(dtype, distribution)


def _code(dtype: torch.dtype, distribution: bool) -> Code:
    code = Code(read=1, sizes=2, written=3)
    (output,), (stride, width), (sums, logits, classes), b = code.read, code.sizes, code.written, code.b
    with code.counting(code.first, code.end, 1) as row:
        code.begin_sums("energy", *["likeliest", "others"] * distribution)
        likeliest = code.begin_largest()
        rows = [(code.row_of(output, row, stride, dtype), dtype)]

        def take(values: list[Any], at: Any, valid: Any) -> None:
            code.add("energy", values[0], values[0])
            if distribution:
                code.note_largest(likeliest, values[0], at, valid)

        code.go_over(rows, width, take)
        if distribution:
            largest = code.largest_lane(b.load(likeliest[0]))

            def take_again(values: list[Any], at: Any, valid: Any) -> None:
                p = code.exp(code.larger(b.fsub(values[0], largest), code.all(SMALLEST_EXPONENT)))
                p = p if valid is None else b.select(valid, p, code.all(0.0))
                # Beside the e^0 of the likeliest, which may be nearly all, others would lose their digits.
                is_likeliest = b.fcmp_ordered("==", p, code.all(1.0))
                code.add("likeliest", b.select(is_likeliest, p, code.all(0.0)))
                code.add("others", b.select(is_likeliest, code.all(0.0), p))

            code.go_over(rows, width, take_again)
        code.keep_sums(row, sums)
        code.keep_largest(likeliest, row, logits, classes)
    return code
