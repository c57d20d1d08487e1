"""Which requests replace others, come first, are refused or are dropped: without a thread and without a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.service.commands import (
    ApplyRecipe,
    Cancel,
    Command,
    FollowRecipe,
    Measure,
    Pause,
    Request,
    Save,
    Scan,
    SetInputs,
    SetRecipe,
    SetSettings,
)
from dtype_engine.service.jobs import GENERATE, VALUES, Ask, GenerateText, InspectTensor
from dtype_engine.service.open_model import Available
from dtype_engine.service.queue import (
    MOST_ALIKE,
    Queue,
    finish,
    job_names,
    merge,
    opened,
    reported,
    supersedes,
    take,
)
from dtype_engine.service.save_requests import RecipeRequest

HALF = Recipe((Rule("*", "float16"),))
BRAIN = Recipe((Rule("*", "bfloat16"),))
SAVE = Save(RecipeRequest(Path("r.yaml")), HALF)


def text(tokens: int) -> Ask:
    return GENERATE.ask(GenerateText(tokens))


def values(tensor: str) -> Ask:
    return VALUES.ask(InspectTensor(tensor, ("int8",)))


WEIGHT = values("w")
IDLE = Queue(available="model", waiting=())


def after(queue: Queue, *requests: Request) -> Queue:
    for request in requests:
        queue = merge(queue, request)
    return queue


def running(command: Command, *waiting: Command) -> Queue:
    return replace(IDLE, running=command, waiting=waiting)


@pytest.mark.parametrize(
    ("requests", "waiting"),
    [
        # Inputs, then the measurement, then its follow-ups, then what was asked for, in its order.
        ((Ask("flow"), SetRecipe(HALF), SetInputs("a")), (SetInputs("a"), Measure(), Ask("flow"))),
        ((Ask("flow"), Ask("floor"), Ask("speed")), (Ask("flow"), Ask("speed"), Ask("floor"))),
        ((text(1), SAVE, WEIGHT, Scan(("int8",))), (text(1), SAVE, WEIGHT, Scan(("int8",)))),
        # Asked for again, most run once: as asked for last, and when asked for last.
        ((text(1), Ask("speed"), text(2)), (Ask("speed"), text(2))),
        ((Scan(("int8",)), Scan(("bfloat16",))), (Scan(("bfloat16",)),)),
        ((SetInputs("a"), SetInputs("b")), (SetInputs("b"),)),
        ((WEIGHT, WEIGHT, SAVE, SAVE), (WEIGHT, WEIGHT, SAVE, SAVE)),
        # A measurement casts, and has follow-ups of its own.
        ((Ask("floor"), ApplyRecipe(), SetRecipe(HALF)), (Measure(),)),
        ((SetRecipe(HALF), Ask("floor"), ApplyRecipe()), (Measure(),)),
        # Reading many bytes stays asked for.
        ((Measure(read_values=True), SetRecipe(HALF)), (Measure(read_values=True),)),
        ((SetSettings(RunSettings()),), (Measure(read_values=True),)),
    ],
)
def test_requests_wait_in_the_queue_in_order_of_priority(
    requests: tuple[Request, ...], waiting: tuple[Command, ...]
) -> None:
    assert after(IDLE, *requests).waiting == waiting


@pytest.mark.parametrize(
    ("command", "request_", "stops"),
    [
        (Measure(), SetRecipe(HALF), True),
        (Ask("floor"), SetRecipe(HALF), True),
        (Scan(("int8",)), SetRecipe(HALF), True),
        (Scan(("int8",)), SetSettings(RunSettings(autocast="bfloat16")), True),
        (Measure(), SetInputs("a"), True),
        (SetInputs("a"), SetInputs("b"), True),
        (SetInputs("a"), SetRecipe(HALF), False),  # it is measured after them anyway
        (SAVE, SetRecipe(HALF), False),
        (SAVE, SetInputs("a"), False),
        (Scan(("int8",)), Ask("flow"), False),
        (Scan(("int8",)), FollowRecipe(HALF), False),
        (Measure(), FollowRecipe(HALF), True),
        (Measure(), Pause(True), False),
    ],
)
def test_newer_requests_stop_the_running_command_if_they_supersede_it(
    command: Command, request_: Request, stops: bool
) -> None:
    assert (merge(running(command), request_).stopping == "newer") is stops


def test_commands_stopped_by_a_newer_recipe_run_again() -> None:
    queue = finish(merge(running(Scan(("int8",)), Ask("speed")), SetRecipe(HALF)), "interrupted")
    assert (queue.recipe, queue.waiting) == (HALF, (Measure(), Scan(("int8",)), Ask("speed")))
    assert queue.dropped == ()


def test_repeated_measurement_replaces_its_waiting_follow_ups() -> None:
    queue = finish(merge(running(Measure(), ApplyRecipe(), Ask("floor"), SAVE), SetInputs("a")), "interrupted")
    assert queue.waiting == (SetInputs("a"), Measure(), SAVE)


def test_stopped_command_is_not_repeated_if_a_newer_one_of_its_kind_waits() -> None:
    for first, anew in ((Measure(), SetRecipe(HALF)), (SetInputs("a"), SetInputs("b"))):
        queue = finish(merge(running(first), anew), "interrupted")
        assert [type(command) for command in queue.waiting] == [type(first)]
        assert first not in queue.waiting or isinstance(first, Measure)


def test_measurement_stopped_by_new_inputs_is_run_after_them() -> None:
    stopped = finish(merge(running(Measure()), SetInputs("a")), "interrupted")
    assert stopped.waiting == (SetInputs("a"), Measure())
    for follow_ups in ((), (Measure(),)):
        assert finish(take(stopped), "done", follow_ups).waiting == (Measure(),)
    assert finish(take(stopped), "failed").waiting == (Measure(),)


def test_follow_ups_stopped_by_new_inputs_are_run_if_the_inputs_are_refused() -> None:
    stopped = finish(merge(running(Ask("floor")), SetInputs("a")), "interrupted")
    assert finish(take(stopped), "done").waiting == (Ask("floor"),)
    assert finish(take(stopped), "done", (Measure(),)).waiting == (Measure(),)


def test_recipe_with_the_same_plan_is_measured_only_if_needed() -> None:
    assert merge(IDLE, FollowRecipe(HALF)) == replace(IDLE, recipe=HALF, waiting=(ApplyRecipe(),))
    for unmeasured in (
        replace(IDLE, waiting=(Measure(),)),
        running(Measure()),
        finish(running(Measure()), "failed"),
        replace(IDLE, available="files"),
        replace(IDLE, available="opening"),
    ):
        queue = merge(unmeasured, FollowRecipe(HALF))
        assert (queue.recipe, queue.waiting) == (HALF, (Measure(),))
    stopped = finish(merge(running(Measure()), Cancel()), "interrupted")
    assert merge(stopped, FollowRecipe(HALF)).waiting == (ApplyRecipe(),)
    assert after(finish(running(Measure()), "failed"), Cancel(), FollowRecipe(HALF)).waiting == (ApplyRecipe(),)
    failed_then_measured = finish(take(merge(finish(running(Measure()), "failed"), SetRecipe(BRAIN))), "done")
    assert merge(failed_then_measured, FollowRecipe(HALF)).waiting == (ApplyRecipe(),)


def test_cancel_stops_all_commands_and_reports_them() -> None:
    queue = merge(running(Measure(), Ask("floor"), Ask("flow"), SAVE), Cancel())
    assert (queue.waiting, queue.stopping, queue.dropped) == ((), "user", ("flow", "write"))
    assert reported(queue).dropped == ("flow", "write")  # told with what was stopped
    ended = finish(queue, "interrupted")
    assert (ended.stopped, ended.dropped, ended.waiting) == ("measure", ("flow", "write"), ())
    assert (reported(ended).stopped, reported(ended).dropped) == (None, ())


def test_measurement_cancelled_at_its_end_has_no_follow_ups() -> None:
    queue = finish(merge(running(Measure()), Cancel()), "done", (Ask("losses"), Ask("floor")))
    assert (queue.waiting, queue.stopped) == ((), "losses")
    queue = finish(merge(running(SAVE), Cancel()), "done", (ApplyRecipe(),))
    assert (queue.waiting, queue.stopped) == ((ApplyRecipe(),), None)


def test_user_can_cancel_a_command_that_a_newer_recipe_is_stopping() -> None:
    queue = finish(after(running(Scan(("int8",))), SetRecipe(HALF), Cancel()), "interrupted")
    assert (queue.waiting, queue.stopped, queue.dropped) == ((), "scan", ("measure",))
    queue = finish(after(running(Scan(("int8",))), Cancel(), SetRecipe(HALF)), "interrupted")
    assert (queue.waiting, queue.stopped) == ((Measure(),), "scan")


def test_user_can_cancel_one_job_by_name() -> None:
    queue = merge(running(Ask("speed"), Ask("causes"), Ask("flow")), Cancel("causes"))
    assert (queue.stopping, queue.waiting) == ("", (Ask("flow"),))
    queue = merge(running(Ask("speed"), Ask("flow")), Cancel("speed"))
    assert (queue.stopping, queue.waiting) == ("user", (Ask("flow"),))


def test_measurement_without_a_live_model_is_called_losses() -> None:
    queue = replace(running(WEIGHT), available="files")
    queue = merge(queue, SetRecipe(HALF))
    assert queue.waiting == (Measure(),)
    assert job_names(queue, queue.waiting) == ("losses",)
    assert merge(queue, Cancel("losses")).waiting == ()
    assert merge(queue, Cancel("measure")).waiting == (Measure(),)
    assert merge(queue, Cancel()).dropped == ("losses",)
    counting = replace(queue, running=Measure(), waiting=())
    assert finish(merge(counting, Cancel("losses")), "interrupted").stopped == "losses"


def test_paused_scan_stays_paused_after_a_measurement_but_not_after_a_cancel() -> None:
    scan = Scan(("int8",))
    interrupted = finish(after(running(scan), Pause(True), SetRecipe(HALF)), "interrupted")
    assert interrupted.paused
    assert not merge(interrupted, Cancel()).paused
    assert not after(running(scan), Pause(True), Cancel("scan")).paused
    assert not after(running(scan), Pause(True), Pause(False)).paused


ASKED = (Ask("flow"), SetInputs("a"), Scan(("int8",)), WEIGHT, SAVE)


def test_number_of_waiting_requests_is_limited() -> None:
    asked = [values(f"w{number}") for number in range(MOST_ALIKE + 3)]
    queue = after(replace(IDLE, running=Measure()), *asked)
    assert queue.waiting == tuple(asked[:MOST_ALIKE])
    assert [name for name, _ in queue.refused] == ["values"] * 3
    more = after(reported(queue), *(SetRecipe(recipe) for recipe in (HALF, BRAIN) * 500), SAVE)
    assert len(more.waiting) == MOST_ALIKE + 2
    assert more.refused == ()


@pytest.mark.parametrize(
    ("available", "kept", "refused"),
    [
        ("model", (SetInputs("a"), Measure(), Ask("flow"), Scan(("int8",)), WEIGHT, SAVE), ()),
        ("files", (Measure(), WEIGHT, SAVE), ("inputs", "flow", "scan")),
        ("nothing", (), ("inputs", "flow", "scan", "values", "write")),
    ],
)
def test_requests_that_need_a_model_are_refused_if_it_cannot_be_opened(
    available: Available, kept: tuple[Command, ...], refused: tuple[str, ...]
) -> None:
    waited = opened(after(Queue(), *ASKED), available, "why")
    asked_then = after(opened(Queue(), available, "why"), *ASKED)
    for queue in (waited, asked_then):
        assert queue.waiting == kept
        assert sorted(queue.refused) == sorted((name, "why") for name in refused)
        assert reported(queue).refused == ()
    assert merge(waited, SetRecipe(HALF)).recipe == HALF


def test_follow_ups_of_a_measurement_have_names_and_can_be_cancelled_alone() -> None:
    queue = running(Ask("floor"), Ask("losses"), SAVE)
    assert queue.running is not None
    assert queue.running.name == "floor"
    assert job_names(queue, queue.waiting) == ("losses", "write")
    without = merge(queue, Cancel("losses"))
    assert job_names(without, without.waiting) == ("write",)
    assert merge(queue, Cancel("losses")).stopping == ""
    assert merge(queue, Cancel("floor")).stopping == "user"
    assert merge(queue, Cancel(None)).dropped == ("write",)


# -- whatever is asked for, in whatever order -------------------------------------------------------------------------

recipes = st.sampled_from([Recipe(), HALF, BRAIN])
commands: st.SearchStrategy[Command] = st.one_of(
    st.builds(SetInputs, st.sampled_from("ab")),
    st.builds(Measure, st.booleans()),
    st.sampled_from([ApplyRecipe(), Ask("floor"), Ask("flow"), Ask("causes"), Ask("speed"), SAVE]),
    st.just(Ask("losses")),
    st.builds(text, st.integers(1, 2)),
    st.builds(Scan, st.sampled_from([("int8",), ("bfloat16",)])),
    st.builds(values, st.sampled_from("vw")),
)
changes: st.SearchStrategy[Request] = st.one_of(
    st.builds(SetRecipe, recipes),
    st.builds(FollowRecipe, recipes),
    st.builds(SetSettings, st.just(RunSettings())),
    st.builds(Pause, st.booleans()),
)
cancels = st.builds(Cancel, st.sampled_from([None, None, "scan", "write", "measure"]))
ends = st.sampled_from(["take", "done", "failed", "interrupted"])


@st.composite
def queues(draw: st.DrawFn) -> Queue:
    """Draw queues that a worker can have, from its start on."""
    queue = Queue()
    for step in draw(st.lists(st.one_of(commands, changes, cancels, ends), max_size=12)):
        if not isinstance(step, str):
            queue = merge(queue, step)
        elif queue.running is not None and step != "take":
            queue = finish(queue, step)  # type: ignore[arg-type]
        elif queue.running is None and queue.waiting and step == "take":
            queue = take(opened(queue, "model"))
    return queue


@given(queues(), st.one_of(commands.filter(lambda command: command.traits.once), changes, cancels))
def test_repeated_request_leaves_the_queue_unchanged(queue: Queue, request_: Request) -> None:
    once = merge(queue, request_)
    assert merge(once, request_) == once


@given(queues(), st.one_of(commands, changes))
def test_queue_drops_only_superseded_requests(queue: Queue, request_: Request) -> None:
    merged = merge(queue, request_)
    new = request_ if isinstance(request_, Command) else Measure()
    rest = [command for command in queue.waiting if not supersedes(new, command)]
    waiting = iter(merged.waiting)
    assert all(any(command == one for command in waiting) for one in rest), "the rest, in its order"
    assert len(merged.waiting) <= len(rest) + (1 if isinstance(request_, Command) else len(queue.waiting) + 1)
    assert [command.traits.rank for command in merged.waiting] == sorted(
        command.traits.rank for command in merged.waiting
    )
    assert merged.dropped == queue.dropped


@given(queues())
def test_queue_repeats_stopped_commands_or_reports_them(queue: Queue) -> None:
    if queue.running is None:
        return
    ended = finish(queue, "interrupted")
    if queue.stopping == "user":
        assert ended.stopped == job_names(queue, (queue.running,))[0]
    else:
        assert any(command == queue.running or supersedes(command, queue.running) for command in ended.waiting)
        gone = {id(command) for command in queue.waiting} - {id(command) for command in ended.waiting}
        assert all(supersedes(queue.running, command) for command in queue.waiting if id(command) in gone)


@given(queues())
def test_cancel_reports_all_dropped_requests(queue: Queue) -> None:
    cancelled = merge(queue, Cancel())
    assert cancelled.waiting == ()
    asked = [command for command in queue.waiting if not command.traits.follows]
    assert cancelled.dropped == (*queue.dropped, *job_names(queue, asked))
    assert (cancelled.stopping == "user") is (queue.running is not None)


@given(queues())
def test_measurement_never_waits_beside_its_own_follow_ups(queue: Queue) -> None:
    measurements = [command for command in queue.waiting if isinstance(command, Measure)]
    assert len(measurements) <= 1
    if measurements:
        assert not [command for command in queue.waiting if isinstance(command, ApplyRecipe) or command.traits.follows]


def test_full_measurement_continues_a_running_one() -> None:
    queue = merge(running(Measure()), Measure(in_full=True))
    assert (queue.in_full, queue.waiting, queue.stopping) == (True, (), "")
    # Not one that a newer recipe has stopped: the next is measured as precisely as was asked for.
    queue = merge(merge(running(Measure()), SetRecipe(HALF)), Measure(in_full=True))
    assert (queue.in_full, queue.waiting) == (False, (Measure(in_full=True),))
    begun = take(finish(queue, "interrupted"))
    assert begun.in_full
    assert not take(finish(merge(begun, SetRecipe(HALF)), "interrupted")).in_full


@pytest.mark.parametrize("command", [Ask("flow"), WEIGHT, SAVE, Measure(), ApplyRecipe()])
def test_measurement_of_the_noise_floor_is_stopped_by_every_request(command: Command) -> None:
    queue = merge(running(Ask("floor")), command)
    assert queue.stopping == "newer"
    waiting = finish(queue, "interrupted").waiting
    # A measurement has a floor of its own to follow.
    assert waiting == ((command,) if isinstance(command, Measure) else (command, Ask("floor")))
