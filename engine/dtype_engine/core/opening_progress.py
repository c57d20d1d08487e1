"""Reports the progress of opening a model by the number of imported modules, which take nearly all of the time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

_MODULES = {"checkpoint": 3000, "single file": 3000, "python": 1300}
"""About how many modules have been imported when a model is open. transformers 5.23 has 3,003; a Python file may need none."""
_INTERVAL_S = 0.2
_MOST_BY_IMPORTS = 0.95
"""The largest fraction that imports may account for; building the model and its inputs comes later."""

READING_INPUTS = "reading the inputs"
"""The last step of opening. Its time depends on the inputs and not on imports, so its total is unknown."""


class OpeningProgress:
    """A context manager that calls `report(step, done, total)` when a step begins and, from a thread of its own, five times a
    second. done, total: numbers of imported modules; a total of 0 means that it is unknown.
    """

    def __init__(self, report: Callable[[str, int, int], None], kind: str) -> None:
        self._report = report
        self._total = _MODULES[kind]
        self._step = ""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dtype-engine-opening", daemon=True)

    def __call__(self, step: str) -> None:
        """Report that a new step of opening the model begins."""
        self._step = step
        self._report_now()

    def __enter__(self) -> OpeningProgress:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()  # no report follows the end of the block

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            if self._step:
                self._report_now()

    def _report_now(self) -> None:
        with self._lock:  # if both threads report at once, the last report is of the newest step
            done = min(len(sys.modules), int(_MOST_BY_IMPORTS * self._total))
            self._report(self._step, done, 0 if self._step == READING_INPUTS else self._total)
