"""The app whose engine works over several processes: what they give is what one gives, Esc stops them all, and a scan goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from tests.helpers.recorded_worker import make_engine
from tests.helpers.screen_text import is_measured, notices, screen, until
from tests.helpers.slow_net import CODE, opened, slow

import dtype_engine as de
from dtype_engine import Options
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.runtime.formats.row_blocks import single_intraop_thread
from dtype_engine.service.process import EngineProcess
from dtype_tui.app import DtypeApp
from dtype_tui.screens.causes import CausesScreen
from dtype_tui.screens.optimise import OptimiseScreen
from dtype_tui.state.launch import Launch
from dtype_tui.state.session_store import SavedSession

pytestmark = pytest.mark.slow
SEQUENCES = 6


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with single_intraop_thread():
        yield


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model whose speed a file sets, with inputs of six sequences. Scans are saved in the same folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "net.py"
    path.write_text(f"import os\n{CODE}\nPath(__file__).with_name(f'process.{{os.getpid()}}').touch()\n")
    inputs = torch.randn(SEQUENCES, 4, 64, generator=torch.Generator().manual_seed(1))
    torch.save([{"x": row} for row in inputs], tmp_path / "inputs.pt")
    slow(path, 0)
    return path


def app_on(net: Path, workers: int | None, saved: SavedSession | None = None) -> DtypeApp:
    options = Options(device="cpu", tensors=net.with_name("inputs.pt"), threads=1, workers=workers)
    launch = Launch("net", saved=saved)
    return DtypeApp(launch, lambda emit, _: make_engine("process", f"{net}:Net", options, emit))


def untimed(report: object) -> object:
    return dataclasses.replace(report, forward_seconds=0.0, scan_seconds=0.0)  # type: ignore[type-var]


async def test_scan_in_several_processes_survives_cancelling_and_killed_processes(net: Path) -> None:
    app = app_on(net, 2)
    experiment = app.controller.experiment
    scan = experiment.scan
    async with opened(app) as pilot:
        others = processes_of(net)
        slow(net, 0.05)
        await pilot.press("s", "enter")
        await until(pilot, lambda: re.search(rf"scan: 2 workers, 0 of {SEQUENCES}", screen(app)))
        await until(pilot, lambda: scan.report is not None)
        await until(pilot, lambda: re.search(rf"scan: 2 workers, [1-5] of {SEQUENCES}", screen(app)))
        await pilot.press("escape")
        await until(pilot, lambda: not app.controller.activity.busy)
        assert notices(app)[-1] == "stopped: scan; s resumes it"
        assert scan.report is not None
        done = scan.report.sequences
        assert 0 < done < SEQUENCES
        time.sleep(1.0)
        assert scan.report.sequences == done  # nothing works on

        slow(net, 0.2)
        await pilot.press("s")
        await until(pilot, lambda: app.controller.activity.what.startswith("scan: 2 workers"))
        await pilot.press("escape")  # the window with the scores so far
        await until(pilot, lambda: len(processes_of(net) - others) == 2)
        workers = processes_of(net) - others
        engine = app.controller.engine
        assert isinstance(engine, EngineProcess)
        assert engine.process_id is not None
        psutil.Process(engine.process_id).kill()
        await until(pilot, lambda: app.controller.life.error is not None)
        assert any("s resumes the scan" in words for words in notices(app))
        assert scan.report is not None
        assert done <= scan.report.sequences < SEQUENCES
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert not alive
        slow(net, 0)
        await pilot.press("R")
        await until(pilot, lambda: experiment.model.live and not app.controller.activity.busy)
        slow(net, 0.05)
        await pilot.press("s")
        await until(pilot, lambda: app.controller.activity.what.startswith("scan: 2 workers"))
        assert not app.controller.activity.what.startswith("scan: 2 workers, 0 of")
        await pilot.press("escape")
        slow(net, 0)
        await until(pilot, lambda: scan.finished and not app.controller.activity.busy)
    session = de.open(f"{net}:Net", options=Options(device="cpu", tensors=net.with_name("inputs.pt"), threads=1))
    assert untimed(scan.report) == untimed(session.scan(scan.requested))
    # Another engine of another session goes on with what was kept: a pass would take a minute now.
    saved = SavedSession(f"{net}:Net", "net", scanned=scan.requested)
    again = app_on(net, None, saved)
    async with opened(again) as pilot:
        slow(net, 5)
        await pilot.press("s")
        await until(pilot, lambda: again.controller.experiment.scan.finished)
        assert again.controller.experiment.scan.report == scan.report
        slow(net, 0)


async def test_causes_and_points_of_the_front_are_measured_in_several_processes(net: Path) -> None:
    app = app_on(net, 2)
    experiment = app.controller.experiment
    session = de.open(f"{net}:Net", options=Options(device="cpu", tensors=net.with_name("inputs.pt"), threads=1))
    async with opened(app) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: is_measured(app))
        await pilot.press("d")
        assert isinstance(app.screen, CausesScreen)
        await until(pilot, lambda: experiment.results.causes is not None)
        await pilot.press("escape")
        session.use_recipe(experiment.recipe)
        found = experiment.results.causes
        assert found is not None
        assert dataclasses.replace(found, seconds=0.0) == dataclasses.replace(session.causes(), seconds=0.0)
        engine = app.controller.engine
        assert isinstance(engine, EngineProcess)
        assert engine.process_id is not None
        await pilot.press("s", "enter")
        await until(pilot, lambda: experiment.scan.finished and not app.controller.activity.busy)
        await pilot.press("o")
        view = app.screen
        assert isinstance(view, OptimiseScreen)
        before = len(experiment.measured)
        await pilot.press("m")
        await until(pilot, lambda: len(experiment.measured) >= before + 5 and not app.controller.activity.busy)
        assert experiment.recipe == Recipe((Rule("*", "bfloat16"),))  # still in force
        for entry in experiment.measured[before:]:
            session.use_recipe(entry.recipe)
            assert session.drift().output.sqnr_db == entry.output.sqnr_db
        assert view.point_measurement() is not None
        await pilot.press("escape")
        # Other settings: all of the history is measured with these.
        app.controller.set_settings(de.RunSettings(compute="bfloat16"))
        await until(pilot, lambda: is_measured(app))
        recipes = {entry.recipe for entry in experiment.measured}
        await pilot.press("H", "m")

        def measured_now() -> set[de.Recipe]:
            now = experiment.settings
            return {entry.recipe for entry in experiment.measured if entry.settings == now}

        await until(pilot, lambda: measured_now() == recipes and not app.controller.activity.busy)
        await pilot.press("m")
        assert "all are already measured on these inputs" in notices(app)[-1]


def processes_of(net: Path) -> set[psutil.Process]:
    """Return the running processes that have imported the model's code."""
    found = set()
    for path in net.parent.glob("process.*"):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(path.suffix[1:]))
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found
