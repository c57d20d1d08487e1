"""The app on a model that is larger than the memory: it says how long a pass takes, and runs it from the disk on request."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from tests.helpers.recorded_worker import make_engine
from tests.helpers.recording_engine import demo_tree, launched, report
from tests.helpers.screen_text import notices, screen, until
from tests.matrix.forms import made

from dtype_engine import Options
from dtype_engine.checkpoint.source import locate
from dtype_engine.recipe import Recipe
from dtype_engine.service import events
from dtype_tui.app import DtypeApp
from dtype_tui.state.activity import Activity
from dtype_tui.state.experiment import Experiment, ModelFacts
from dtype_tui.state.launch import Launch
from dtype_tui.widgets.status import status_line


@pytest.mark.slow
async def test_app_runs_a_model_larger_than_memory_from_disk_on_request(tmp_path: Path) -> None:
    folder = str(made("folder, bf16", tmp_path / "made").model)
    source, options = locate(folder), Options(max_memory={"cpu": 1 << 12}, sequences=2, floor="never")
    launch = Launch(source.title, source.peek()[0])
    app = DtypeApp(launch, lambda emit, _: make_engine("thread", folder, options, emit))
    async with app.run_test(size=(120, 36)) as pilot:
        experiment = app.main.experiment
        await until(pilot, lambda: experiment.model.no_forward is not None and experiment.tree.has_classes)
        why = str(experiment.model.no_forward)
        assert "O runs it from the disk, which reads all weights once for the reference" in why
        assert re.search(r"at least \d+ \w+ each at the .*/s measured now; computing often takes longer", why)
        await pilot.press("O")
        await until(pilot, lambda: experiment.results.report is not None and "● ready" in screen(app))
        assert experiment.model.no_forward is None
        assert " a pass" in screen(app)
        await pilot.press("O")
        await until(pilot, lambda: any("runs from the disk already" in each for each in notices(app)))


async def test_key_shift_o_says_if_the_model_runs_from_the_disk_already() -> None:
    async with launched() as (app, pilot):
        app.controller.handle(events.Memory(Recipe(), dataclasses.replace(report(Recipe()).memory, read_bytes=1 << 20)))
        app.controller.handle(events.MeasuringProgress(Recipe(), "reference", 1, 4))
        await pilot.press("O")
        assert notices(app) == ["the model runs from the disk already"]


def test_narrow_status_line_shows_esc_rather_than_bytes_read() -> None:
    seconds = [0.0]
    working, experiment = Activity(lambda: seconds[0]), Experiment(ModelFacts("demo", inputs="prompts"), demo_tree())
    words = "running each module as cast by itself"
    for done in range(41):
        working.begin(words, done / 100)
        seconds[0] += 60
    experiment.take(events.Memory(Recipe(), dataclasses.replace(report(Recipe()).memory, read_bytes=98 << 30)))
    shown = {width: status_line(experiment, (words, 0.4, "Esc stops"), working, "", width, {}) for width in (80, 120)}
    assert "98.0 GiB read" in shown[120].plain
    assert "Esc stops" in shown[80].plain[:80]
