"""What a function gives to a callback is yielded one item at a time, while the function waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing

import pytest

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled
from dtype_engine.core.handed_over import handed_over


def test_producer_waits_until_the_next_item_is_asked_for() -> None:
    events = list[str]()

    def produce(give: Callable[[int], None], cancelled: IsCancelled) -> None:
        for number in range(3):
            events.append(f"made {number}")
            give(number)

    for number in handed_over(produce, never):
        events.append(f"used {number}")
    assert events == ["made 0", "used 0", "made 1", "used 1", "made 2", "used 2"]


def test_error_of_the_producer_is_raised_after_its_items() -> None:
    def produce(give: Callable[[int], None], cancelled: IsCancelled) -> None:
        give(1)
        raise ValueError("no more")

    found = list[int]()
    with pytest.raises(ValueError, match="no more"):
        found.extend(handed_over(produce, never))
    assert found == [1]


def test_producer_is_cancelled_when_the_iterator_is_closed() -> None:
    seen, threads = list[object](), threading.active_count()

    def produce(give: Callable[[int], None], cancelled: IsCancelled) -> None:
        seen.append(cancelled())
        try:
            give(1)
        except Cancelled as error:
            seen.extend((error, cancelled()))
            raise

    with closing(handed_over(produce, never)) as items:
        assert next(items) == 1
    assert [seen[0], type(seen[1]), seen[2]] == [False, Cancelled, True]
    assert threading.active_count() == threads
