"""Probes: random vectors at the main output, whose mean outer product is its Fisher information.

Distributions take random (Rademacher) signs and not Gaussians, as Hutchinson's estimator of a trace (1990) does: they have the
least variance.

Shapes: P positions (of all examples), C classes. Output [..., C]; a probe has the shape and dtype of the output.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


class OutputProbes:
    """Gradients at the main output whose mean outer product is what the drift's second order weighs errors by.

    For a distribution of C classes over P positions that is the Fisher information of the softmax, for any other output
    the identity. `normalizer` is what sums are divided by: positions, or the output's energy Σr². Where few probes span it they
    are all taken, and the result is exact (`complete`): their outer products then sum up to it.
    """

    def __init__(self, output: torch.Tensor, distribution: bool, num_probes: int, seed: int) -> None:
        self.output = output
        self.generator = torch.Generator(device="cpu").manual_seed(seed)
        self.distribution = distribution
        rows = output.reshape(-1, output.shape[-1]) if distribution else output.reshape(1, -1)
        rank = len(rows) * (rows.shape[1] - 1) if distribution else rows.shape[1]
        self.complete = rank <= num_probes
        self.count = max(1, rank) if self.complete else num_probes
        self.normalizer = float(len(rows)) if distribution else float(output.double().square().sum())
        self._rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        for row in self._spanning() if self.complete else self._drawn():
            yield row.reshape(self.output.shape).to(self.output)

    def _drawn(self) -> Iterator[torch.Tensor]:
        if not self.distribution:
            for _ in range(self.count):
                yield torch.randn(self._rows.shape, generator=self.generator)
            return
        p = torch.softmax(self._rows.float(), -1)
        root = p.sqrt()
        for _ in range(self.count):
            # A quarter of the time that `bernoulli_` takes.
            signs = torch.randint(0, 2, p.shape, generator=self.generator, dtype=torch.int32).mul_(2).sub_(1)
            part = root * signs.to(p.device)
            yield part - p * part.sum(-1, keepdim=True)

    def _spanning(self) -> Iterator[torch.Tensor]:
        if not self.distribution:
            yield from torch.eye(self._rows.shape[1])
            return
        p = torch.softmax(self._rows.double(), -1)
        for position, row in enumerate(p):
            values, vectors = torch.linalg.eigh(torch.diag(row) - row[:, None] * row)
            for value, vector in zip(values[1:], vectors.T[1:], strict=True):
                probe = torch.zeros_like(p)
                probe[position] = value.clamp(min=0).sqrt() * vector
                yield probe
