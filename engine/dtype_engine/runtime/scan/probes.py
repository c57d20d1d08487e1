"""Creates probes: random vectors from which backward passes start at the main output.

Probes of distributions are computed from random (Rademacher) signs, as in Hutchinson's trace estimator (1990), because estimates
from signs have a lower variance than estimates from Gaussian numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dtype_engine.runtime.device import for_sums


class OutputProbes:
    """Yields the probes for one output: vectors whose mean outer product is the matrix M for which an output error Δ causes a drift
    proportional to Δᵀ M Δ, to second order.

    For a distribution of C classes over P positions, M is the Fisher information of the softmax. For any other output, it is the
    identity. Drifts are divided by `normalizer`: the number of positions, or the output's energy Σr². If a few vectors give M
    exactly as the sum of their outer products, all of them are used instead of random ones, and `complete` is True.
    """

    def __init__(self, output: torch.Tensor, distribution: bool, num_probes: int, seed: int) -> None:
        self.output = output
        self.generator = torch.Generator(device="cpu").manual_seed(seed)
        self.distribution = distribution
        rows = output.reshape(-1, output.shape[-1]) if distribution else output.reshape(1, -1)
        rank = len(rows) * (rows.shape[1] - 1) if distribution else rows.shape[1]
        self.complete = rank <= num_probes
        self.count = max(1, rank) if self.complete else num_probes
        self.normalizer = float(len(rows)) if distribution else float(for_sums(output).double().square().sum())
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
            # `randint` takes a quarter of the time of `bernoulli_`.
            signs = torch.randint(0, 2, p.shape, generator=self.generator, dtype=torch.int32).mul_(2).sub_(1)
            part = root * signs.to(p.device)
            yield part - p * part.sum(-1, keepdim=True)

    def _spanning(self) -> Iterator[torch.Tensor]:
        if not self.distribution:
            yield from torch.eye(self._rows.shape[1])
            return
        p = torch.softmax(for_sums(self._rows).double(), -1)
        for position, row in enumerate(p):
            values, vectors = torch.linalg.eigh(torch.diag(row) - row[:, None] * row)
            for value, vector in zip(values[1:], vectors.T[1:], strict=True):
                probe = torch.zeros_like(p)
                probe[position] = value.clamp(min=0).sqrt() * vector
                yield probe
