"""An iterator over what a function gives to a callback, one item at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from queue import SimpleQueue
from typing import TypeVar

from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import Cancelled

T = TypeVar("T")


def handed_over(produce: Callable[[Callable[[T], None], IsCancelled], object], cancelled: IsCancelled) -> Generator[T]:
    """Yield each item that `produce(give, cancelled)` passes to `give`. `produce` runs in a thread of its own, and waits in `give`
    until the next item is asked for, so only one of the two threads computes at a time. Raises what `produce` raises.

    If the iterator is closed before its end, `give` raises Cancelled, and `cancelled()` is True. Close it (`contextlib.closing`)
    where the code that uses the items may raise an error, so that `produce` ends before the error is handled.
    """
    given, resumed, stopped = SimpleQueue[tuple[T] | BaseException | None](), threading.Semaphore(0), threading.Event()

    def give(item: T) -> None:
        given.put((item,))
        del item  # the caller may drop it meanwhile
        resumed.acquire()
        if stopped.is_set():
            raise Cancelled

    def work() -> None:
        try:
            produce(give, lambda: stopped.is_set() or cancelled())
        except BaseException as error:
            given.put(error)
        else:
            given.put(None)

    thread = threading.Thread(target=work, name="produces items")
    thread.start()
    try:
        while (item := given.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
            resumed.release()
    finally:
        stopped.set()
        resumed.release()
        thread.join()
