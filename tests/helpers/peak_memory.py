"""Anonymous memory that a call takes at its peak: what the process allocates, without the pages mapped from files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from dtype_engine.core.system_memory import trim_heap


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process, in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])


def peak_anonymous(run: Callable[[], object]) -> int:
    """Bytes of anonymous memory that `run` adds at its peak, sampled every millisecond.

    Call `run` once before, on something small: what its first call imports counts otherwise.
    """
    trim_heap()
    before = peak = anonymous_bytes()
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        run()
    finally:
        done.set()
        sampler.join()
    return peak - before
