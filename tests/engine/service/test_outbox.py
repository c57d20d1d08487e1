"""Events on their way: what newer ones take the place of, what is sent again after a cut, in any order of both ends' doings."""

from __future__ import annotations

import threading

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dtype_engine import Recipe, Rule
from dtype_engine.results.drift import ModuleDrift
from dtype_engine.service import events
from dtype_engine.service.outbox import Outbox

RECIPES = (Recipe(), Recipe((Rule("*", "float16"),)))


def reading(name: str, value: float) -> ModuleDrift:
    return ModuleDrift(name, value, 0.0, 0)


recipes = st.sampled_from(RECIPES)
EVENTS = st.one_of(
    st.builds(events.Idle),
    st.builds(events.Refused, st.just("flow"), st.text("ab", max_size=2)),
    st.builds(events.LoadingProgress, st.text("ab", max_size=2)),
    st.builds(events.WorkingProgress, recipes, st.just("w"), st.integers(0, 3), st.just(3)),
    st.builds(events.Jobs, st.sampled_from(["", "measure"]), st.just(())),
    st.builds(events.CastDone, recipes, st.none()),
)


END = events.OpenFailed("end")


def newest(waiting: list[events.Event], event: events.Event) -> list[events.Event]:
    """A model of `put` with a plain list."""
    if isinstance(event, events.REPLACEABLE):
        waiting = [old for old in waiting if type(old) is not type(event)]
    return [*waiting, event]


def drained(outbox: Outbox) -> list[events.Event]:
    outbox.put(END)
    taken = []
    while (event := outbox.take()) is not END:
        assert event is not None
        taken.append(event)
    return taken


@given(st.lists(EVENTS))
def test_outbox_sends_only_the_newest_progress_and_all_other_events(told: list[events.Event]) -> None:
    outbox, model = Outbox(), list[events.Event]()
    for event in told:
        outbox.put(event)
        model = newest(model, event)
    outbox.open()
    assert drained(outbox) == model
    assert [event for event in told if not isinstance(event, events.REPLACEABLE)] == [
        event for event in model if not isinstance(event, events.REPLACEABLE)
    ]
    for kind in events.REPLACEABLE:
        assert [event for event in told if type(event) is kind][-1:] == [e for e in model if type(e) is kind]


@given(st.lists(st.tuples(recipes, st.lists(st.sampled_from("abc"), max_size=3, unique=True)), max_size=6))
def test_outbox_merges_module_results_by_recipe_and_name(
    told: list[tuple[Recipe, list[str]]],
) -> None:
    outbox, expected = Outbox(), {recipe: dict[str, ModuleDrift]() for recipe in RECIPES}
    for number, (recipe, names) in enumerate(told):
        readings = tuple(reading(name, number) for name in names)
        expected[recipe] |= {made.name: made for made in readings}
        outbox.put(events.ModulesMeasured(recipe, readings))
    outbox.open()
    left = drained(outbox)
    assert len(left) == len({recipe for recipe, _ in told})
    for event in left:
        assert isinstance(event, events.ModulesMeasured)
        assert {made.name: made for made in event.modules} == expected[event.recipe]
        assert len(event.modules) == len(expected[event.recipe])


def is_open(machine: Connections) -> bool:  # hypothesis would parse this file for each use of a lambda
    return machine.is_open


def has_more(machine: Connections) -> bool:
    return machine.is_open and bool(machine.waiting or machine.sent < len(machine.left))


class Connections(RuleBasedStateMachine):
    """An outbox, and an app that receives events, is disconnected and returns. Sent events stay until they are acknowledged."""

    @initialize()
    def begin(self) -> None:
        self.outbox = Outbox(keep=True)
        self.waiting: list[events.Event] = []
        self.left: list[events.Event] = []
        """In the order in which they left, every one once."""
        self.sent = 0
        """How many of these have left on this connection or before."""
        self.acknowledged = 0
        self.is_open = False

    @rule(event=EVENTS)
    def put(self, event: events.Event) -> None:
        again = self.left[self.sent :]
        self.outbox.put(event)
        rest = newest([*again, *self.waiting], event)
        self.left, self.waiting = self.left[: self.sent], rest

    @precondition(has_more)
    @rule()
    def take(self) -> None:
        event = self.outbox.take()
        if self.sent == len(self.left):
            self.left.append(self.waiting.pop(0))
        assert event == self.left[self.sent]
        self.sent += 1

    @precondition(is_open)
    @rule(back=st.integers(0, 3))
    def acknowledge(self, back: int) -> None:
        count = max(self.acknowledged, self.sent - back)
        self.outbox.acknowledge(count)
        self.acknowledged = count

    @rule(back=st.integers(0, 3))
    def cut_and_come_back(self, back: int) -> None:
        """Reconnect an app that has received all but the last few events that were sent."""
        received = max(self.acknowledged, self.sent - back)
        self.outbox.shut()
        assert self.outbox.take() is None
        self.outbox.open(received)
        self.acknowledged = self.sent = received
        self.is_open = True


TestConnections = Connections.TestCase


@pytest.mark.parametrize("wake", ["put", "shut"])
def test_outbox_wakes_a_waiting_reader(wake: str) -> None:
    outbox, taken = Outbox(), list[events.Event | None]()
    outbox.open()
    thread = threading.Thread(target=lambda: taken.append(outbox.take()))
    thread.start()
    if wake == "put":
        outbox.put(events.Idle())
    else:
        outbox.shut()
    thread.join(10)
    assert taken == [events.Idle() if wake == "put" else None]
