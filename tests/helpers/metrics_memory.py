"""How much memory the metrics take beyond the logits that they are given.

    python -m tests.helpers.metrics_memory [POSITIONS] [VOCABULARY] [SEQUENCE]

Compares POSITIONS (4096) logits over VOCABULARY (128000) classes, in sequences of SEQUENCE (512), float32 against bfloat16,
and prints the peak of the resident set beyond what it was when the first two tensors of logits were there, in MB.
"""

from __future__ import annotations

import resource
import sys

import torch

from dtype_engine.runtime.numerics.compare.metrics import OutputMetrics


def main() -> None:
    positions, vocabulary, sequence = (
        int(sys.argv[index]) if len(sys.argv) > index else default
        for index, default in ((1, 4096), (2, 128_000), (3, 512))
    )
    reference = torch.empty(sequence, vocabulary).normal_()
    candidate = reference.bfloat16()
    labels = torch.randint(0, vocabulary, (sequence,))
    comparison = OutputMetrics(-1)
    comparison.add(reference[:1], candidate[:1], labels[:1])  # what torch itself takes at its first call
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(positions // sequence):
        comparison.add(reference, candidate, labels)
    found = comparison.result()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert found.positions == positions // sequence * sequence + 1
    print((after - before) * 1024 / 1e6)


if __name__ == "__main__":
    main()
