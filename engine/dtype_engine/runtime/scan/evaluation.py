"""The seam through which many recipes are evaluated: anything in the shape of `concurrent.futures.Executor`.

In line is the default: one after the other, on the one live model. A cluster's executor can take its place, with an `evaluate`
that finds the model on its side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class InLine(Executor):
    """Runs everything in the caller's thread, when it is asked for the result: nothing runs ahead of a cancel."""

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """Run now; the future is done when this returns."""
        future: Future[Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def map(
        self, fn: Callable[..., Result], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[Result]:
        """Each call as its result is asked for."""
        return map(fn, *iterables)
