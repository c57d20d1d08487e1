"""How a scan stands to the exhaustive truth."""

from __future__ import annotations

import statistics

from scipy.stats import spearmanr

from dtype_engine.results.scan import ScanReport

FLOOR = 1e-12
"""Under this, a drift in nats is float32's own rounding in the measurement, not the cast's."""


def compared(scan: ScanReport, exact: ScanReport, dtype: str | None = None) -> tuple[float, float, int]:
    """Spearman and the median ratio over all weights x dtypes (or in one dtype) above the floor, and how many these are."""
    estimates, truths = scan.scores(), exact.scores()
    keys = [key for key, truth in truths.items() if truth > FLOOR and dtype in (None, key[1])]
    found, true = [estimates[key] for key in keys], [truths[key] for key in keys]
    return float(spearmanr(found, true).statistic), statistics.median(map(float.__truediv__, found, true)), len(keys)
