"""The app on a model of which only the headers are here: it plans, says what is missing, downloads it, and goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.helpers.hub_server import hub_of
from tests.helpers.recorded_worker import make_engine
from tests.helpers.screen_text import notices, screen, until
from tests.matrix.forms import made

from dtype_engine import Options
from dtype_engine.checkpoint.source import locate
from dtype_engine.recipe import Recipe, Rule
from dtype_tui.app import DtypeApp
from dtype_tui.state.launch import Launch

pytestmark = pytest.mark.slow
MODEL = "hf://org/name"


async def test_app_plans_with_hub_headers_and_opens_the_model_after_a_download(tmp_path: Path) -> None:
    folder = Path(made("folder, bf16", tmp_path / "made").model)
    with hub_of(tmp_path / "cache", org__name=folder) as hub:
        source = locate(MODEL)
        tree, whole = source.peek()
        launch = Launch(source.title, tree, recipe=Recipe((Rule.parse("*.mlp=fp8"),)), partial=not whole)
        app = DtypeApp(launch, lambda emit, _: make_engine("thread", MODEL, Options(), emit, read_headers=not whole))
        async with app.run_test(size=(120, 36)) as pilot:
            await until(
                pilot, lambda: app.main.experiment.model.no_forward is not None and app.main.experiment.tree.has_classes
            )
            assert ":download fetches the model" in str(app.main.experiment.model.no_forward)
            await until(pilot, lambda: re.search(r"fits [\d.]+ .iB of memory", screen(app)))
            assert "{hint" not in screen(app)
            await pilot.press("p")
            await until(pilot, lambda: "fp8-linears" in screen(app) and " less  fits" in screen(app))
            await pilot.press("escape")
            assert app.main.experiment.plan.planned_bytes < app.main.experiment.plan.stored_bytes
            before = len(hub.requests)
            await pilot.press("colon", *"download", "enter")
            await until(pilot, lambda: app.main.experiment.results.report is not None)
            assert app.main.experiment.model.live
            assert app.main.experiment.model.no_forward is None
            assert "no forward pass" not in screen(app)
            assert any(path.endswith("model.safetensors") for path in hub.paths()[before:])
            await pilot.press("colon", *"download", "enter")
            await until(pilot, lambda: any("is on this machine already" in each for each in notices(app)))
