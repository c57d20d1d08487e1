"""The figures of each position of one sequence of logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from dtype_engine.runtime.numerics.compare.reference_rows import ReferenceRows, logits_of


@dataclass(slots=True)
class PositionFigures:
    """The figures of each position of one sequence: KL, whether the likeliest class is the same, ln p and ln q of the label."""

    labels: torch.Tensor | None
    kl: torch.Tensor
    same_top: torch.Tensor
    log_p: torch.Tensor
    log_q: torch.Tensor

    @classmethod
    def of(cls, count: int, labels: torch.Tensor | None) -> PositionFigures:
        kl, log_p, log_q = (torch.zeros(count, dtype=torch.float64) for _ in range(3))
        return cls(labels, kl, torch.zeros(count, dtype=torch.bool), log_p, log_q)

    def keep_scored(self) -> None:
        """Once all rows are filled in: keep ln p and ln q of positions with a label alone."""
        if self.labels is not None:
            scored = (self.labels >= 0).cpu()
            self.log_p, self.log_q = self.log_p[scored], self.log_q[scored]

    def compare(self, rows: slice, r: torch.Tensor, c: torch.Tensor) -> None:
        """Fill in some rows from their logits, float64 [rows, classes]."""
        log_p = torch.log_softmax(r, -1)
        if c is r:
            log_q = log_p
            self.same_top[rows] = True  # and the KL of zero is there already
        else:
            log_q = torch.log_softmax(c, -1)
            p, ratio = log_p.exp(), log_p - log_q
            kl = (p * ratio).sum(-1)
            if not bool(torch.isfinite(kl).all()):
                # 0 ln 0 = 0: a class that the reference rules out adds nothing, whatever the candidate says of it.
                kl = torch.where(p > 0, p * ratio, torch.zeros_like(p)).sum(-1)
                kl[torch.isnan(r).any(-1) | torch.isposinf(r).any(-1)] = math.nan  # such a reference has no p
            self.kl[rows] = kl.cpu()
            self.same_top[rows] = _likeliest(r) == _likeliest(c)
        if self.labels is not None:
            index = self.labels[rows].clamp(min=0)[:, None]
            self.log_p[rows] = log_p.gather(1, index)[:, 0].cpu()
            self.log_q[rows] = log_q.gather(1, index)[:, 0].cpu()


class FinitePositions:
    """The positions of one sequence whose logits are all finite, as they go by; `fill` has their figures, once all have.

    log_ratio: ln Σ e^c - ln Σ e^r.
    """

    def __init__(self, count: int) -> None:
        self._known, self._same_top = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
        self._kl, self._log_ratio = np.zeros(count), np.zeros(count)

    def add(self, rows: slice | np.ndarray, kl: np.ndarray, log_ratio: np.ndarray, same_top: np.ndarray) -> None:
        """Take in some rows, or those that are marked, bool [rows]."""
        self._kl[rows], self._log_ratio[rows], self._same_top[rows] = kl, log_ratio, same_top
        self._known[rows] = True

    def add_equal(self, rows: slice) -> None:
        """Some rows of which both outputs are the same."""
        self._same_top[rows] = self._known[rows] = True

    def fill(
        self, figures: PositionFigures, reference: torch.Tensor, candidate: torch.Tensor, of_reference: ReferenceRows
    ) -> None:
        """Fill in the figures of these positions, of the outputs [rows, classes] of all."""
        known = self._known
        figures.kl.numpy()[known] = self._kl[known]
        figures.same_top.numpy()[known] = self._same_top[known]
        if figures.labels is not None and known.any():
            labels = figures.labels.clamp(min=0)
            with np.errstate(all="ignore"):  # rows that are not finite
                log_p = of_reference.log_p(labels, reference)
                moved = logits_of(labels, candidate) - logits_of(labels, reference) - self._log_ratio
            figures.log_p.numpy()[known] = log_p[known]
            figures.log_q.numpy()[known] = (log_p + moved)[known]


def _likeliest(r: torch.Tensor) -> torch.Tensor:
    """The first of the largest of each row, on the CPU: numpy's argmax there takes a sixth of the time of torch's."""
    return torch.from_numpy(r.numpy().argmax(-1)) if r.device.type == "cpu" else r.argmax(-1).cpu()
