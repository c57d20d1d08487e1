"""What Enter shows of a node: the drift of the whole model is its output's."""

from __future__ import annotations

import msgspec
import pytest
from tests.helpers.recording_engine import launched, make_app, running
from tests.helpers.scenes import Scene, measured_in_part, mixed
from tests.helpers.screen_text import lines, screen
from textual.containers import VerticalScroll

from dtype_engine.core.units import human_bytes
from dtype_engine.reports.layer_kinds import totals_by_kind


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "rows"),
    [
        (
            measured_in_part,
            {"so far": "2 of 6 sequences, 295 tokens", "SQNR": "40.00 dB ± 0.43", "max |Δ|": "5.0000e-01"},
        ),
        (
            mixed,
            {
                "over": "6 of 6 sequences, 973 tokens",
                "SQNR": "40.00 dB",
                "mean |Δ|": "1.6400e-02",
                "peak": "452.00 MiB",
            },
        ),
    ],
)
async def test_details_of_the_model_show_every_drift_figure(scene: Scene, rows: dict[str, str]) -> None:
    app = make_app()
    async with running(app, (120, 44)) as pilot:  # all rows
        await scene(app, pilot)
        await pilot.press("less_than_sign", "enter")
        await pilot.pause()
        box = app.screen.query_one(VerticalScroll).content_region
        shown = [line[box.x : box.right].strip() for line in lines(app)[box.y : box.bottom]]
        assert "the whole model" in shown[0]
        for label, words in rows.items():
            assert [line for line in shown if line.startswith(f"{label} ") and line.endswith(f" {words}")], (
                label,
                shown,
            )


@pytest.mark.slow
async def test_details_of_the_model_show_its_quantization() -> None:
    async with launched() as (app, pilot):
        await mixed(app, pilot)
        app.controller.experiment.model = msgspec.structs.replace(
            app.controller.experiment.model, provenance=("gptq; 4-bit", "by it")
        )
        await pilot.press("less_than_sign", "enter")
        await pilot.pause()
        rows = [" ".join(line.split()) for line in lines(app)]
        for line in ("provenance gptq; 4-bit", "provenance by it"):
            assert any(line in row for row in rows), screen(app)


@pytest.mark.slow
async def test_details_of_the_model_show_bytes_by_layer_kind() -> None:
    async with launched() as (app, pilot):
        await mixed(app, pilot)
        await pilot.press("less_than_sign", "enter")
        await pilot.pause()
        totals = totals_by_kind(app.controller.experiment.tree, app.controller.experiment.plan.dtypes)
        rows = [" ".join(line.split()) for line in lines(app)]
        for kind, below in totals.items():
            assert any(f" {kind} {human_bytes(below.total_bytes)} " in row for row in rows), screen(app)
