"""Whatever an engine tells, as long as the types are right: the app lives on, and nothing but text reaches the terminal.

`python -m tests.tui.test_hostile_events SEED COUNT` goes on with other chances and in a larger terminal as well, twice as long in
each scene: `make fuzz` does it.
"""

from __future__ import annotations

import asyncio
import random
import sys

import pytest
from tests.helpers.random_events import RandomEvents
from tests.helpers.recording_engine import engine, make_app, running
from tests.helpers.scenes import SCENES
from tests.helpers.screen_text import lines

from dtype_engine.core.text import printable
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.worker import events
from dtype_engine.worker.frames import WireError
from dtype_engine.worker.messages import AnswerDecoder
from dtype_tui.app import DtypeApp

SEQUENCES = 4
SIZES = ((80, 24), (120, 36))
RULES = ("*=bfloat16", "*.mlp=float8_e4m3fn", "model.layers.2=float16")
KEYS = (
    *"jklhud3soeipHmfgtvcxwnEWGazR[]{}<>,.:/?", "tab", "enter", "escape", "escape", "escape", "pageup", "pagedown", "end",
)  # fmt: skip


class Hostility:
    """An app, and an engine that tells it anything."""

    def __init__(self, app: DtypeApp, chance: random.Random) -> None:
        self._app = app
        self._chance = chance
        self._decoder = AnswerDecoder()

    def sequence(self, kind: type | None = None) -> None:
        """Tell some events, of any kind or of this one, as the engine's process does, up to one that is refused."""
        experiment = self._app.controller.experiment
        recipes = (Recipe(), experiment.recipe, *(Recipe((Rule.parse(rule),)) for rule in RULES))
        telling = RandomEvents(self._chance, experiment.tree, recipes)
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
        """Nothing on the screen is a command to the terminal."""
        for line in lines(self._app):
            assert printable(line, len(line)) == line, "\n".join(lines(self._app))


async def go_through(
    scene: str, seed: str, sequences: int, kind: type | None = None, size: tuple[int, int] = SIZES[0]
) -> None:
    """Sequences of events in one scene, with a key in between now and then."""
    chance = random.Random(f"{scene} {seed}")
    app = make_app()
    async with running(app, size) as pilot:
        if scene in SCENES:
            await SCENES[scene](app, pilot)
        hostility = Hostility(app, chance)
        for _ in range(sequences):
            hostility.sequence(kind)
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
async def test_it_lives_on(scene: str) -> None:
    await go_through(scene, "0", SEQUENCES)


@pytest.mark.slow
async def test_figures_so_far_may_be_anything() -> None:
    await go_through("measuring", "so far", 3 * SEQUENCES, events.OutputMeasured)


def main() -> None:
    """Until one fails, which is told with its seed."""
    for seed in range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2])):
        for scene in ("before the model", *SCENES):
            try:
                asyncio.run(go_through(scene, str(seed), 2 * SEQUENCES, size=SIZES[seed % 2]))
            except BaseException:
                print(f"seed {seed}, {scene}", file=sys.stderr)
                raise


if __name__ == "__main__":
    main()
