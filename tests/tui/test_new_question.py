"""A new question is a row of the engine's table, a row of the app's table, and a window: this file has all three.

`python -m tests.tui.test_new_question` adds the rows before the app is imported, and asks the question.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.helpers.paths import ROOT

from dtype_engine.service import events
from dtype_engine.service.frames import WireError
from dtype_engine.service.jobs import JOBS, Job, Work
from dtype_engine.service.messages import AnswerDecoder, decode_request, encode_answer, encode_request
from dtype_tui.config.questions import QUESTIONS, Question

if TYPE_CHECKING:
    from textual.screen import Screen

    from dtype_tui.screens.overlay import Answer

MAY_END = threading.Event()


@dataclass
class Shapes:
    scalars: int
    matrices: int


def count_shapes(work: Work[None], _: None) -> Shapes:
    MAY_END.wait(60)
    shapes = [tensor.shape for tensor in work.cast_session().tree.tensors.values()]
    return Shapes(shapes.count(()), sum(len(shape) == 2 for shape in shapes))


def check_shapes(shapes: Shapes) -> None:
    if shapes.scalars < 0:
        raise ValueError("fewer scalars than none")


def shapes_screen(answer: Answer[None, Shapes]) -> Screen[None]:
    from rich.text import Text

    from dtype_tui.screens.overlay import Overlay

    return Overlay("Shapes of tensors", Text(f"{answer.result.matrices} of two dimensions"))


SHAPES = Job("shapes", run=count_shapes, check=check_shapes)
ROW = Question(
    "shapes",
    "counting shapes",
    "shapes",
    "f9 counts them again",
    key="f9",
    meaning="Shapes: count the tensors of each number of dimensions",
    group="Measure",
    help="shapes of the tensors",
    window="tests.tui.test_new_question.shapes_screen",
)


@pytest.fixture
def new_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(JOBS, SHAPES.name, SHAPES)


@pytest.mark.usefixtures("new_job")
def test_a_new_question_and_its_answer_survive_encoding() -> None:
    ask = SHAPES.ask(None)
    assert decode_request(encode_request(ask)) == ask
    (data,) = encode_answer(events.JobDone(None, ask, Shapes(1, 2)))
    assert AnswerDecoder().decode(data) == events.JobDone(None, ask, Shapes(1, 2))


@pytest.mark.usefixtures("new_job")
@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"scalars": "1", "matrices": 2}, "Expected `int`, got `str`"),
        ({"scalars": -1, "matrices": 2}, "fewer scalars than none"),
    ],
)
def test_answer_of_the_wrong_type_to_a_new_question_is_refused(result: dict[str, object], words: str) -> None:
    with pytest.raises(WireError, match=words):
        AnswerDecoder().decode(msgspec.msgpack.encode(["JobDone", None, ["Ask", "shapes", None], result]))


@pytest.mark.slow
def test_key_of_a_new_question_asks_the_engine_and_opens_its_window() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.tui.test_new_question"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr


async def ask_by_key() -> None:
    from tests.helpers.screen_text import lines, screen, until
    from tests.helpers.slow_net import app_on

    from dtype_engine import Options

    options = Options(prompts=("import os\n",), device="cpu", floor="never")
    app = app_on("thread", "demo", options)
    async with app.run_test(size=(120, 36)) as pilot:
        controller = app.controller
        await until(pilot, lambda: controller.experiment.results.report and not controller.activity.busy)
        matrices = sum(len(tensor.shape) == 2 for tensor in controller.experiment.tree.tensors.values())
        await pilot.press("f9")
        await until(pilot, lambda: "counting shapes" in lines(app)[-2])
        await pilot.press("J")
        await until(pilot, lambda: "counting shapes" in screen(app) and "Jobs of the engine" in screen(app))
        await pilot.press("escape")
        MAY_END.set()
        await until(pilot, lambda: f"{matrices} of two dimensions" in screen(app))
        await pilot.press("escape", "question_mark")
        await until(pilot, lambda: "shapes of the tensors" in screen(app))
        await pilot.press("escape", "colon", *"shapes", "enter")
        await until(pilot, lambda: f"{matrices} of two dimensions" in screen(app))
        assert ROW.meaning in [command.title for command in app.get_system_commands(app.screen)]


def main() -> None:
    JOBS[SHAPES.name] = SHAPES
    QUESTIONS.append(ROW)
    asyncio.run(ask_by_key())


if __name__ == "__main__":
    main()
