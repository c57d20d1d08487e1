"""Whatever an engine tells, as long as the types are right: the app lives on, and nothing but text reaches the terminal.

`python -m tests.tui.test_hostile_events SEED COUNT` goes on with other chances and in a larger terminal as well, twice as long in
each scene, and with every kind of event that has hostile texts alone: `make fuzz` does it.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence

import pytest
from tests.helpers.random_events import KINDS, RandomEvents
from tests.helpers.recording_engine import engine, launched, make_app, running, say
from tests.helpers.scenes import SCENES
from tests.helpers.screen_text import lines

from dtype_engine.core.text import printable
from dtype_engine.core.tree import TensorInfo, from_tensors
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.service import events
from dtype_engine.service.frames import WireError
from dtype_engine.service.jobs import FLOW
from dtype_engine.service.messages import AnswerDecoder, encode_answer
from dtype_tui.app import DtypeApp
from dtype_tui.main_screen import MOST_WINDOWS
from dtype_tui.rendering.printable_lines import PrintableLines

SEQUENCES = 4
SIZES = ((80, 24), (120, 36))
RULES = ("*=bfloat16", "*.mlp=float8_e4m3fn", "model.layers.2=float16")
KEYS = (
    *"jklhud3soeipHmfgtvcxwnEWGazR[]{}<>,.:/?", "tab", "enter", "escape", "escape", "escape", "pageup", "pagedown", "end",
)  # fmt: skip


class Hostility:
    """Sends random events of an engine to an app."""

    def __init__(self, app: DtypeApp, chance: random.Random) -> None:
        self._app = app
        self._chance = chance
        self._decoder = AnswerDecoder()

    def sequence(self, kind: type | None = None, hostile: bool = False) -> None:
        """Send some events of this kind (None: of any), as the engine's process does. An event that can't be decoded is sent as the
        end of the engine.
        """
        experiment = self._app.controller.experiment
        recipes = (Recipe(), experiment.recipe, *(Recipe((Rule.parse(rule),)) for rule in RULES))
        telling = RandomEvents(self._chance, experiment.tree, recipes, hostile)
        for _ in range(self._chance.choice((1, 1, 3, 8))):
            try:
                for message in telling.next(kind):
                    event = self._decoder.decode(message)
            except WireError as error:
                self._decoder.begin_again()
                words = f"the engine sent what this version does not understand: {printable(str(error), 200)}"
                event = events.EngineEnded(words)
            assert event is not None
            engine(self._app).emit(event)  # type: ignore[arg-type]

    def check(self) -> None:
        check_screen(self._app)


def check_screen(app: DtypeApp) -> None:
    """Assert that the screen contains no control characters and no links, and that no text moves its neighbors."""
    strips = app.screen._compositor.render_strips()
    for line in (strip.text for strip in strips):
        assert printable(line, len(line)) == line, "\n".join(strip.text for strip in strips)
    for segment in (segment for strip in strips for segment in strip):
        assert not segment.control, segment
        assert segment.style is None or segment.style.link is None, segment


def without_last_check(app: DtypeApp) -> None:
    """Remove the filter that would repair a line that was not escaped."""
    app._filters[:] = [each for each in app._filters if not isinstance(each, PrintableLines)]


async def go_through(
    scene: str,
    seed: str,
    kinds: Sequence[type | None],
    hostile: bool = False,
    size: tuple[int, int] = SIZES[0],
) -> None:
    """Send sequences of events in one scene, and press a key now and then. kinds: the kind of the events of each sequence; None:
    any. hostile: whether all texts of the tree and of the events are hostile.
    """
    chance = random.Random(f"{scene} {seed}")
    app = make_app()
    without_last_check(app)
    async with running(app, size) as pilot:
        if scene in SCENES:
            await SCENES[scene](app, pilot)
        hostility = Hostility(app, chance)
        for kind in (events.HeadersRead, *kinds) if hostile else kinds:
            hostility.sequence(kind, hostile)
            await pilot.pause()
            await pilot.pause()
            hostility.check()
            if chance.random() < 0.4:
                await pilot.press(chance.choice(KEYS))
                await pilot.pause()
                hostility.check()
        assert app.is_running


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["before the model", *SCENES])
async def test_app_survives_random_events(scene: str) -> None:
    await go_through(scene, "0", [None] * SEQUENCES)


async def test_control_characters_in_a_failure_that_equals_a_module_name_are_escaped() -> None:
    name = "\x1b]0;owned\x07"
    tree = from_tensors([TensorInfo(f"{name}.weight", (2, 2), "float32")])
    app = make_app()
    without_last_check(app)
    async with running(app) as pilot:
        hostility, decoder = Hostility(app, random.Random(0)), AnswerDecoder()
        ready = events.ModelReady(tree, name, name, 1.0, name, (name,), name)
        failed = events.Failed(app.controller.experiment.recipe, name, name)
        for event in (events.HeadersRead(tree), failed, ready, failed):
            for answer in map(decoder.decode, encode_answer(event)):
                if answer is not None:
                    await say(app, pilot, answer)  # type: ignore[arg-type]
            hostility.check()
        assert sum("\\x1b]0;owned\\x07" in line for line in lines(app)) > 2


async def test_overlong_error_text_of_the_engine_is_cut() -> None:
    async with launched() as (app, pilot):
        await SCENES["as-stored"](app, pilot)
        await say(app, pilot, events.Failed(app.controller.experiment.recipe, "no kernel " * 1_000_000))
        assert 1000 < len(app.controller.experiment.results.failure or "") < 5000
        assert any("no kernel" in line for line in lines(app))


@pytest.mark.slow
async def test_number_of_windows_opened_by_results_is_limited() -> None:
    async with launched(size=SIZES[0]) as (app, pilot):
        await SCENES["as-stored"](app, pilot)
        for _ in range(10):
            for _ in range(20):
                engine(app).emit(events.JobDone(app.controller.experiment.recipe, FLOW.ask(None), ()))
            await pilot.pause()
        await pilot.pause()
        assert 1 < len(app.screen_stack) <= MOST_WINDOWS
        await pilot.press(*["escape"] * MOST_WINDOWS)
        await pilot.pause()
        assert app.screen_stack == [app.main]


@pytest.mark.slow
async def test_app_survives_any_values_of_partial_drift() -> None:
    await go_through("measuring", "so far", [events.OutputMeasured] * 3 * SEQUENCES)


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["mix", "leave"])
async def test_app_survives_hostile_names_in_every_event(scene: str) -> None:
    await go_through(scene, "names", KINDS, hostile=True)


def main() -> None:
    """Run until a test fails, and print its seed."""
    for seed in range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2])):
        for scene in ("before the model", *SCENES):
            try:
                asyncio.run(go_through(scene, str(seed), [None] * 2 * SEQUENCES, size=SIZES[seed % 2]))
                kinds = random.Random(seed).sample(KINDS, len(KINDS))
                asyncio.run(go_through(scene, str(seed), kinds, hostile=True, size=SIZES[seed % 2]))
            except BaseException:
                print(f"seed {seed}, {scene}", file=sys.stderr)
                raise


if __name__ == "__main__":
    main()
