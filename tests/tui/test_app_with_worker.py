"""The app with a real engine, in a thread and in another process: what a key asks for, what Esc stops, what stays on the screen."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import checkpoint_folders
from tests.helpers.panicking_tokenizer import with_panicking_tokenizer
from tests.helpers.recorded_worker import WAYS, Way
from tests.helpers.screen_text import is_measured, notices, screen, until
from tests.helpers.slow_net import CODE, app_on, opened, slow
from textual.pilot import Pilot

from dtype_engine import Options
from dtype_engine.core.units import human_count
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.service import events
from dtype_tui.app import DtypeApp
from dtype_tui.screens.causes import CausesScreen
from dtype_tui.screens.overlay import Overlay
from dtype_tui.state.rule_list import RuleList
from dtype_tui.state.session_store import SavedSession

pytestmark = pytest.mark.slow
INPUTS = "\ndef example_inputs():\n    return (torch.linspace(-1, 1, 256).reshape(4, 64),)\n"


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    """Where the engine of a test runs."""
    which: Way = request.param
    return which


@pytest.fixture
def net(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(CODE + INPUTS)
    slow(path, 0)
    return path


def module_of(path: Path) -> Any:
    """Return the class of the model file, imported by Python."""
    spec = importlib.util.spec_from_file_location("own_import", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Net


def jobs(app: DtypeApp) -> tuple[str, tuple[str, ...]]:
    """Return the running job and the waiting jobs."""
    return app.controller.activity.running, app.controller.activity.waiting


@asynccontextmanager
async def measured(way: Way, net: Path) -> AsyncIterator[tuple[DtypeApp, Pilot[None]]]:
    """Return the app on the model of `net`, after a cast was measured."""
    app = app_on(way, f"{net}:Net")
    async with opened(app) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: is_measured(app))
        yield app, pilot


# -- a model that has no headers -----------------------------------------------------------------------------------


def expected_of(path: Path) -> tuple[int, int]:
    """Parameters, and bytes of all tensors of the model, by torch."""
    module = module_of(path)()
    tensors = [*module.parameters(), *module.buffers()]
    return sum(p.numel() for p in module.parameters()), sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("class", "thread"),
        ("class", "process"),
        ("function", "thread"),
        ("module", "process"),
        ("weights", "thread"),
        ("no inputs", "process"),
        ("cast", "thread"),
        ("resume", "process"),
    ],
)
async def test_sizes_of_a_python_model_are_shown_in_tree_and_pane(
    kind: str, net: Path, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    monkeypatch.syspath_prepend(str(net.parent))
    monkeypatch.chdir(net.parent)
    options, model = Options(), f"{net}:Net"
    if kind == "function":
        model = f"{net}:make"
    elif kind == "module":
        model = "net:Net"
    elif kind == "weights":
        torch.save(module_of(net)().state_dict(), net.parent / "net.pth")
        options = Options(weights=net.parent / "net.pth")
    elif kind == "no inputs":
        net.write_text(CODE)
    recipe = Recipe((Rule("layers.*", "bfloat16"),))
    more: dict[str, dict[str, Any]] = {
        "cast": {"recipe": recipe},
        "resume": {"saved": SavedSession(model, "net", rule_lists=(RuleList(), RuleList.of(recipe.rules)), at=1)},
    }
    app = app_on(way, model, options, **more.get(kind, {}))
    parameters, stored = expected_of(net)
    halved = sum(2 * t.numel() for t in module_of(net)().layers.parameters())
    async with opened(app) as pilot:
        assert not app.controller.experiment.model.partial
        assert app.controller.experiment.totals[""].parameters == parameters
        assert app.controller.experiment.plan.stored_bytes == stored
        await until(pilot, lambda: re.search(rf"of {stored / 1024:.2f} KiB", screen(app)))
        text = screen(app)
        assert "when all headers are read" not in text
        if kind in ("cast", "resume"):
            assert re.search(rf"planned +{(stored - halved) / 1024:.2f} KiB", text), text
        assert f"{human_count(parameters)} params" in text.splitlines()[0], text
        assert re.search(rf"▌.* {app.controller.experiment.plan.planned_bytes / 1024:.1f} KiB", text), text
        await pilot.press("2")
        await until(pilot, lambda: not app.controller.activity.busy)
        assert "when all headers are read" not in screen(app)


# -- a damaged part of a model's folder ------------------------------------------------------------------------------


async def test_model_whose_tokenizer_panics_is_measured_on_token_ids(tmp_path: Path) -> None:
    """The tokenizer is one of those in `engine/hostile/test_preprocessing.py`."""
    app = app_on("thread", str(with_panicking_tokenizer("a damaged precompiled normaliser", tmp_path / "model")))
    async with opened(app) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: app.controller.experiment.results.report is not None)
        await pilot.press("i")
        await until(pilot, lambda: "has a tokenizer that is damaged" in " ".join(screen(app).split()))


async def test_model_whose_processor_fails_opens_without_inputs(tmp_path: Path) -> None:
    folder = checkpoint_folders.save("vit", tmp_path / "vit")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_mean": [0.5] * 7}))
    app = app_on("thread", str(folder))
    async with opened(app) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: "Drift unknown: the image processor" in screen(app))


# -- what is refused takes nothing off the screen --------------------------------------------------------------------


async def test_key_that_is_refused_gives_a_notice_and_the_drift_stays_on_the_screen(net: Path, way: Way) -> None:
    async with measured(way, net) as (app, pilot):
        report = app.controller.experiment.results.report
        await until(pilot, lambda: screen(app).splitlines()[-1].startswith(" 1-8 dtype  c cast  u undo  w worst"))
        hints = screen(app).splitlines()[-1]
        heard: list[events.Event] = []
        app.controller.engine._emit = lambda event, emit=app.controller.engine._emit: (heard.append(event), emit(event))  # type: ignore[attr-defined]
        assert app.main.tree_view.go_to("norm.num_batches_tracked")
        for keys, words in ((("g",), "does not generate text"), (("v",), "")):
            count = len(notices(app))
            await pilot.press(*keys)
            await until(pilot, lambda count=count: len(notices(app)) > count)  # type: ignore[misc]
            await until(pilot, lambda: not app.controller.activity.busy)
            assert words in notices(app)[-1]
            if len(app.screen_stack) > 1:
                await pilot.press("escape")
            assert app.controller.experiment.results.failure is None
            assert app.controller.experiment.results.report is report
            assert re.search(r"SQNR .*\d\d\.\d\d dB", screen(app))
            await until(pilot, lambda: screen(app).splitlines()[-1] == hints)
        assert not [
            event for event in heard if isinstance(event, (events.MeasuringProgress, events.Measured, events.Failed))
        ]


async def test_failed_measurement_is_shown_in_the_drift_pane(tmp_path: Path, way: Way) -> None:
    path = tmp_path / "fails.py"
    body = CODE.replace(
        "x = layer(x).relu()", "assert layer.weight.dtype != torch.float16, 'not in half'; x = layer(x)"
    )
    path.write_text(body + INPUTS)
    slow(path, 0)
    app = app_on(way, f"{path}:Net")
    async with opened(app) as pilot:
        await pilot.press("3")
        await until(pilot, lambda: app.controller.experiment.results.failure)
        await until(pilot, lambda: not app.controller.activity.busy)
        await until(pilot, lambda: "not in half" in screen(app))
        await pilot.press("g")
        assert "does not generate" in notices(app)[-1]
        assert "not in half" in str(app.controller.experiment.results.failure)


# -- Esc ---------------------------------------------------------------------------------------------------------------

WINDOWS = ("e", "i", "comma", "p", "H", "question_mark", "enter", "s")
"""The keys that open a window."""


async def test_closing_a_window_does_not_stop_the_measurement(net: Path, way: Way) -> None:
    # A measurement that is under way would go on over all inputs, and keep the figures that it has.
    async with measured(way, net) as (app, pilot):
        for key in WINDOWS if way == "thread" else WINDOWS[:2]:  # which window it is makes no difference to an engine
            slow(net)
            await pilot.press("m")
            await until(
                pilot,
                lambda: (
                    app.controller.activity.what.startswith("measuring: candidate")
                    and app.controller.experiment.results.report is None
                ),
            )
            await pilot.press(key)
            await until(pilot, lambda: len(app.screen_stack) == 2)
            await pilot.press("escape")
            await until(pilot, lambda: len(app.screen_stack) == 1)
            slow(net, 0)
            await until(pilot, lambda: is_measured(app))
            assert not any("stopped" in words for words in notices(app)), key


async def test_esc_during_causes_cancels_only_the_causes(net: Path, way: Way) -> None:
    async with measured(way, net) as (app, pilot):
        report = app.controller.experiment.results.report
        slow(net)
        await pilot.press("t")
        await until(pilot, lambda: app.controller.activity.what.startswith("timing"))
        await pilot.press("d")
        assert isinstance(app.screen, CausesScreen)
        await until(pilot, lambda: "The causes follow, after: timing" in screen(app))
        await pilot.press("escape")
        await until(pilot, lambda: jobs(app) == ("speed", ()))
        slow(net, 0)
        await until(pilot, lambda: isinstance(app.screen, Overlay))  # the times, told to the end
        await pilot.press("escape")
        await until(pilot, lambda: not app.controller.activity.busy)
        slow(net)
        await pilot.press("d")
        await until(pilot, lambda: app.controller.activity.running == "causes")
        await pilot.press("escape")
        slow(net, 0)
        await until(pilot, lambda: not app.controller.activity.busy)
        assert app.controller.experiment.results.causes is None
        assert app.controller.experiment.results.report is report
        assert notices(app)[-1] == "stopped: running each module as cast by itself; d runs them again"
        assert re.search(r"SQNR .*\d\d\.\d\d dB", screen(app))


async def test_message_after_esc_says_which_jobs_were_stopped_and_which_did_not_start(net: Path, way: Way) -> None:
    async with measured(way, net) as (app, pilot):
        for keys, said in (
            (("t",), "stopped: timing; t times again"),
            (("t", "f"), "stopped: timing; t times again. Not begun: dtype flow"),
            (("m",), "stopped: measuring; m measures again"),
        ):
            slow(net, 2.0)  # a pass takes 24 s, which Esc has to be in time for on a busy machine, too
            await pilot.press(*keys)
            running = {"t": "speed", "m": "measure"}[keys[0]]
            await until(pilot, lambda running=running: app.controller.activity.running == running)  # type: ignore[misc]
            await pilot.pause(0.3)
            await pilot.press("escape")
            await until(pilot, lambda: not app.controller.activity.busy)
            await until(pilot, lambda said=said: notices(app)[-1:] == [said])  # type: ignore[misc]
            assert (app.controller.experiment.results.report is not None) == (keys != ("m",))


async def test_cancelled_speed_measurement_restores_the_casts_and_says_so(net: Path, way: Way) -> None:
    async with measured(way, net) as (app, pilot):
        assert app.controller.experiment.memory is not None
        before = app.controller.experiment.memory.resident_bytes
        slow(net)
        await pilot.press("t")
        # The model is in float32 now, and is seen to be.
        await until(
            pilot,
            lambda: (
                app.controller.experiment.memory
                and (app.controller.experiment.memory.resident_bytes or 0) > (before or 0)
            ),
        )
        await pilot.press("escape")
        await until(pilot, lambda: not app.controller.activity.busy)
        assert app.controller.experiment.memory.resident_bytes == before


# -- what waits ------------------------------------------------------------------------------------------------------


async def test_jobs_waiting_for_a_measurement_are_listed_until_done(net: Path, way: Way) -> None:
    app = app_on(way, f"{net}:Net")
    async with opened(app, (80, 24)) as pilot:
        slow(net, 1)
        await pilot.press("2")
        await until(pilot, lambda: app.controller.activity.what.startswith("measuring"))
        await pilot.press("t", "f", "t")
        # The second t asks for what is asked for already.
        await until(pilot, lambda: app.controller.activity.waiting == ("speed", "flow"))
        await until(pilot, lambda: "next: timing, dtype flow" in screen(app))
        # A newer recipe goes first; nothing that was asked for is lost.
        await pilot.press("3")
        await until(pilot, lambda: jobs(app) == ("measure", ("speed", "flow")))
        slow(net, 0)
        await until(pilot, lambda: len(app.screen_stack) == 3 and not app.controller.activity.busy)
        assert app.controller.activity.waiting == ()


async def test_speed_measurement_interrupted_by_a_cast_runs_afterwards(net: Path, way: Way) -> None:
    app = app_on(way, f"{net}:Net")
    async with opened(app) as pilot:
        slow(net, 1)
        await pilot.press("t")
        await until(pilot, lambda: app.controller.activity.running == "speed")
        await pilot.press("3")
        await until(pilot, lambda: jobs(app) == ("measure", ("speed",)))
        slow(net, 0)
        await until(pilot, lambda: isinstance(app.screen, Overlay) and not app.controller.activity.busy)
        await until(pilot, lambda: "f16" in screen(app))


async def test_export_plan_is_shown_while_measuring(net: Path, way: Way) -> None:
    app = app_on(way, f"{net}:Net")
    async with opened(app) as pilot:
        slow(net, 0.5)
        await pilot.press("2")
        await until(pilot, lambda: app.controller.activity.what.startswith("measuring"))
        await pilot.press("e")
        await until(pilot, lambda: "tensors: bf16" in screen(app))
        assert app.controller.activity.running == "measure"
        await pilot.press("escape")
