"""What every comparison with one reference output on the CPU needs of its rows, worked out once."""

from __future__ import annotations

import numpy as np
import torch

from dtype_engine.runtime.formats.row_blocks import rows_in_cache
from dtype_engine.runtime.numerics.machine_code import FEWEST_VALUES
from dtype_engine.runtime.numerics.reference_kernel import ReferenceKernel, RowFigures
from dtype_engine.runtime.numerics.row_function import is_available

_EXP_IN_RANGE = 500.0
"""e^x of float64, and sums of 10^90 of them, are in range for |x| up to this."""
_INTEGERS = {
    torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64,
}  # fmt: skip
"""Those that have the bits of a float."""


class ReferenceRows:
    """Figures of each row of a reference output [rows, width], [rows] each.

    finite: whether all of it is, its energy too, and in float64 so it is with those beside it. energy: Σr². Of logits also the
    first of the likeliest classes, `top`, and its logit, `largest`, and `log_total`, ln Σ e^r. They mean nothing where a row is
    not finite. in_float64: whether they were worked out so. Those of wide rows are not where there is machine code for it: energy
    and Σ e^r have seven digits then.
    """

    def __init__(self, output: torch.Tensor, distribution: bool, in_float64: bool = False) -> None:
        count, width = output.shape
        self.in_float64 = in_float64 or width < FEWEST_VALUES or not is_available(output.dtype)
        self.finite = np.zeros(count, dtype=np.bool_)
        self.energy = np.zeros(count)
        self.top = np.zeros(count, dtype=np.int64)
        self.largest, self.log_total = np.zeros(count), np.zeros(count)
        if not self.in_float64:
            self._use(ReferenceKernel.of(output.dtype, distribution).figures(output), distribution)
            return
        with torch.no_grad():
            buffer: torch.Tensor | None = None
            for rows in rows_in_cache(count, width):
                values = output[rows]
                buffer = (
                    values.new_empty(values.shape, dtype=torch.float64) if buffer is None else buffer[: len(values)]
                )
                wide = widen(values, buffer)
                self.energy[rows] = torch.linalg.vector_norm(wide, dim=-1).square().numpy()
                self.finite[rows] = np.isfinite(self.energy[rows]).all()
                if distribution and self.finite[rows].all():
                    of_rows = Exponentials(values, wide)
                    self.top[rows], self.largest[rows] = of_rows.top, of_rows.largest
                    self.log_total[rows] = of_rows.log_total

    def _use(self, figures: RowFigures, distribution: bool) -> None:
        self.energy, self.finite = figures.energy, np.isfinite(figures.energy)
        if distribution:
            self.top, self.largest = figures.top, figures.largest
            with np.errstate(all="ignore"):  # rows that are not finite
                self.log_total = np.log(figures.total) + figures.largest

    def log_p(self, labels: torch.Tensor, output: torch.Tensor) -> np.ndarray:
        """The logarithm of the probability of one class in each row of the output."""
        return logits_of(labels, output) - self.log_total


class Exponentials:
    """Of the rows of logits, all finite: `top`, `largest` and `log_total` as `ReferenceRows` has them."""

    def __init__(self, logits: torch.Tensor, wide: torch.Tensor) -> None:
        """Of logits [rows, classes], and the same in float64, which is written over."""
        values = wide.numpy()
        self.top = first_of_largest(logits, values)
        self.largest: np.ndarray = values[np.arange(len(values)), self.top]
        shift = exponentiate(wide, self.largest, wide)
        self.log_total: np.ndarray = np.log(wide.sum(-1).numpy()) + shift


def exponentiate(logits: torch.Tensor, largest: np.ndarray, into: torch.Tensor) -> np.ndarray:
    """Write e^(x - shift) of logits, float64 [rows, classes], over `into`, which may be the same. Returns the shifts, [rows]: the
    largest of each row, or zeros where all of these are in range.
    """
    if np.abs(largest).max(initial=0.0) <= _EXP_IN_RANGE:
        torch.exp(logits, out=into)
        return np.zeros(len(largest))
    torch.sub(logits, torch.from_numpy(largest)[:, None], out=into).exp_()
    return largest


def logits_of(labels: torch.Tensor, logits: torch.Tensor) -> np.ndarray:
    """One logit of each row, float64 [rows]."""
    chosen: np.ndarray = logits.detach().gather(1, labels[:, None])[:, 0].double().numpy()
    return chosen


def widen(values: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Write values over a buffer of float64, float16 by way of float32: torch has vector code for these two steps alone."""
    return into.copy_(values.float() if values.dtype == torch.float16 else values)


def first_of_largest(logits: torch.Tensor, wide: np.ndarray) -> np.ndarray:
    """The first of the largest of each row [rows, classes], all of them finite; `wide` has the same in float64. torch's own takes
    six times as long.
    """
    if logits.dtype in _INTEGERS:
        bits = bits_of(logits)
        top: np.ndarray = bits.argmax(-1)
        if (bits[np.arange(len(bits)), top] > 0).all():
            return top
    return np.asarray(wide.argmax(-1))


def bits_of(logits: torch.Tensor) -> np.ndarray:
    """The bits of floats as integers: positive floats are in their order, and above all that are negative. So the largest of a row
    is found where it is positive, and what both threads have just written need not be read by one: logits of bfloat16 are a
    quarter of it.
    """
    bits: np.ndarray = logits.detach().view(_INTEGERS[logits.dtype]).numpy()
    return bits
