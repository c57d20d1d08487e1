"""All ways to use a model without a screen, and what fills a cell."""

from __future__ import annotations

from pathlib import Path

import dtype_engine as de

from . import commands
from .caches import CACHES, drift_kv
from .commands import LIVE, Cell, Job, Refused, Way
from .forms import Made, entered
from .limits import LIMITS, drift_over_memory

COMMANDS: dict[str, Way] = commands.COMMANDS | CACHES | LIMITS
SCHEME_WAYS: dict[str, Way] = commands.SCHEME_WAYS | {
    "drift *.kv_cache": drift_kv,
    "drift --over-memory": drift_over_memory,
}
"""The ways to use each scheme of quantized weights."""
NO_NAME = "a module in memory has no name on a command line"


def go(way: str, made: Made, work: Path) -> Cell:
    """Fill one cell. It holds what the result was compared with, or the sentence of a refusal. All other errors are raised."""
    work.mkdir(parents=True, exist_ok=True)
    ways = LIVE if made.live else COMMANDS | SCHEME_WAYS
    if way not in ways:
        return Cell(refusal=NO_NAME)
    with entered(made):
        try:
            return Cell(oracle=ways[way](Job(made, work)))
        except (Refused, de.NoForward) as error:
            return Cell(refusal=str(error))
