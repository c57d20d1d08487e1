"""Events on their way to the main screen: what replaces each other, and who waits for whom."""

from __future__ import annotations

import threading

import hypothesis.strategies as st
import pytest
from hypothesis import given

from dtype_engine.recipe import Recipe
from dtype_engine.service import events
from dtype_tui.state.event_queue import EventQueue

EVENTS = st.one_of(
    st.builds(events.Idle),
    st.builds(events.Noticed, st.text("ab", max_size=2)),
    st.builds(events.WorkingProgress, st.just(Recipe()), st.just("w"), st.integers(0, 3), st.just(3)),
    st.builds(events.Jobs, st.sampled_from(["", "measure"]), st.just(())),
)


@given(st.lists(st.one_of(EVENTS, st.none())))
def test_event_queue_keeps_only_the_newest_progress_and_all_other_events(told: list[events.Event | None]) -> None:
    """None takes an event."""
    calls: list[None] = []
    queue, model = EventQueue(lambda: calls.append(None)), list[events.Event]()
    taken = 0
    for event in told:
        if event is None:
            assert queue.take() == (model.pop(0) if model else None)
            taken = min(taken + 1, len(calls))
        else:
            if isinstance(event, events.REPLACEABLE):
                model = [old for old in model if type(old) is not type(event)]
            model.append(event)
            queue.put(event)
        assert len(calls) == taken + len(model), "the main screen takes one event for each call"
    assert [queue.take() for _ in model] == model
    assert queue.take() is None


@pytest.mark.parametrize("end", ["taken", "shut"])
def test_event_queue_blocks_the_pipe_reader_until_events_are_handled(end: str) -> None:
    queue = EventQueue(lambda: None)
    queue.wait_until_empty()
    queue.put(events.Idle())
    queue.put(events.Noticed("a"))
    thread = threading.Thread(target=queue.wait_until_empty, daemon=True)
    thread.start()
    queue.take()
    assert thread.is_alive()
    if end == "taken":
        queue.take()
    else:
        queue.shut()
    thread.join(20)
    assert not thread.is_alive()
