"""How far the opening of a model is. Nearly all of its time goes into imports, so Python's modules are counted."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

WITH_TRANSFORMERS = 3000
"""Modules that there are once torch, transformers and the class of a language model are imported: 3,003 with transformers 5.23.
Other classes need some more or fewer.
"""
WITHOUT = 1300
"""The same without transformers, which code that makes its own model may not need."""
_INTERVAL_S = 0.2
_MOST = 0.95
"""The share that imports can reach: making the model and its inputs comes after them."""

READING_INPUTS = "reading the inputs"
"""The last step: a long text takes as long as it takes, whatever was imported before."""


class OpeningProgress:
    """Calls `tell(step, done, total)` when a step begins, and up to five times a second until the end of the `with` block, from a
    thread of its own: an import says nothing by itself. total: the modules that there will be, about; what is told of it is 0
    where nothing says how far a step is.
    """

    def __init__(self, tell: Callable[[str, int, int], None], total: int) -> None:
        self._tell = tell
        self._total = total
        self._done = 0
        self._step = ""
        self._told: tuple[str, int] | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def __call__(self, step: str) -> None:
        """This is done now, in a few words."""
        with self._lock:
            self._step = step
            self._tell_now()

    def __enter__(self) -> OpeningProgress:
        threading.Thread(target=self._watch, name="dtype-engine-opening", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:  # nothing is told after this
            self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            with self._lock:
                self._tell_now()

    def _tell_now(self) -> None:
        if self._step and not self._ended.is_set():
            self._done = max(self._done, min(len(sys.modules), int(_MOST * self._total)))
            if self._told != (self._step, self._done):  # nothing new costs no event
                self._told = self._step, self._done
                self._tell(self._step, self._done, 0 if self._step == READING_INPUTS else self._total)
