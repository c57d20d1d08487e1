"""How far the opening of a model is. Nearly all of its time goes into imports, so Python's modules are counted."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

_MODULES = {"checkpoint": 3000, "python": 1300}
"""Modules that there are once a model of a kind is opened, about: 3,003 with transformers 5.23, which code that makes its own
model may not need.
"""
_INTERVAL_S = 0.2
_MOST = 0.95
"""The share that imports can reach: making the model and its inputs comes after them."""

READING_INPUTS = "reading the inputs"
"""The last step: a long text takes as long as it takes, whatever was imported before."""


class OpeningProgress:
    """Calls `tell(step, done, total)` when a step begins, and five times a second until the end of the `with` block, from a thread
    of its own: an import says nothing by itself. A total of 0: nothing says how far the step is.
    """

    def __init__(self, tell: Callable[[str, int, int], None], kind: str) -> None:
        self._tell = tell
        self._total = _MODULES[kind]
        self._step = ""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dtype-engine-opening", daemon=True)

    def __call__(self, step: str) -> None:
        """This is done now, in a few words."""
        self._step = step
        self._tell_now()

    def __enter__(self) -> OpeningProgress:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()  # nothing is told after this

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            if self._step:
                self._tell_now()

    def _tell_now(self) -> None:
        with self._lock:  # of two threads, the last one tells of the newest step
            done = min(len(sys.modules), int(_MOST * self._total))
            self._tell(self._step, done, 0 if self._step == READING_INPUTS else self._total)
