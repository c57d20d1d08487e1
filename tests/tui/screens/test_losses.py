"""Values that casts lose, on the screen: in the pane, the tree, the status line, and before an export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from rich.segment import Segment
from safetensors.torch import load_file, save_file
from tests.helpers.recording_engine import engine, launched, report, running, say
from tests.helpers.screen_text import screen, until
from tests.helpers.slow_net import app_on

from dtype_engine.checkpoint.source import locate
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.results.attribution import LossRemedy
from dtype_engine.results.losses import ValueLoss
from dtype_engine.service import events
from dtype_engine.service.jobs import LOSS_REMEDY
from dtype_engine.service.save_requests import ExportPlan
from dtype_engine.service.worker import Worker
from dtype_tui.app import DtypeApp
from dtype_tui.state.launch import Launch
from dtype_tui.state.measurement_log import measured
from dtype_tui.state.results import Losses
from dtype_tui.widgets.module_tree import ModuleTree

WIDE, SMALL = (120, 36), (80, 24)
F16 = Recipe((Rule("*", "float16"),))
DOWN = "model.layers.1.mlp.down_proj.weight"
LOST = (
    ValueLoss(DOWN, "float16", 64, 0, 128),
    ValueLoss("model.norm.weight", "float16", 0, 3, 100_000),
)
SPACE = Segment(" ")
SENTENCE = "64 of 128 values became infinite in float16"


def flat(app: DtypeApp) -> str:
    return " ".join(screen(app).replace("│", " ").split())


def pane(app: DtypeApp) -> str:
    """What the Drift pane shows, in one line."""
    return " ".join(
        "".join(segment.text for line in app.main.side.panes[0]._shown for segment in (*line, SPACE)).split()
    )


async def cast(app: DtypeApp, pilot: object, lost: tuple[ValueLoss, ...] | None, reason: str = "") -> None:
    app.controller.apply_recipe(F16)
    await say(app, pilot, events.CastDone(F16, lost, reason), events.Idle())  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("size", [WIDE, SMALL])
async def test_values_lost_in_casts_are_shown_in_pane_tree_and_status_line(size: tuple[int, int]) -> None:
    async with launched(size=size) as (app, pilot):
        await cast(app, pilot, LOST)
        app.clear_notifications()
        await pilot.pause()
        await until(pilot, lambda: SENTENCE in pane(app))
        assert "⚠ 64 values became infinite" in flat(app)  # the status line
        app.query_one(ModuleTree).go_to(DOWN)
        await pilot.pause()
        lines = [line for line in screen(app).splitlines() if "⚠ 64 inf" in line]
        assert len(lines) >= 4  # the tensor and the modules above it
        await say(app, pilot, events.Measured(F16, report(F16)))
        assert SENTENCE in pane(app)
        app.controller.experiment.measured = (measured(replace(report(F16), lost=LOST), F16, RunSettings(), 1000),)
        await pilot.press("H")
        assert "⚠ 64 inf" in flat(app)
        await pilot.press("escape")
        await pilot.press("u")
        await say(app, pilot, events.CastDone(Recipe(), ()), events.Idle())
        app.clear_notifications()
        await pilot.pause()
        assert "infinite" not in flat(app)
        assert "⚠" not in flat(app)


async def test_few_values_rounded_to_zero_are_shown_only_in_the_details() -> None:
    async with launched() as (app, pilot):
        await cast(app, pilot, LOST[1:])
        assert "⚠" not in flat(app)
        app.query_one(ModuleTree).go_to("model.norm.weight")
        await pilot.press("enter")
        assert "3 of 100,000 values became zero in float16, which is rounding" in flat(app)


async def test_key_a_applies_the_rules_suggested_for_lost_values() -> None:
    async with launched() as (app, pilot):
        await pilot.press("a")
        assert app.controller.experiment.recipe == Recipe()
        await cast(app, pilot, LOST)
        drift = report(F16).output
        found = LossRemedy((f"{DOWN}=bfloat16",), (DOWN,), 2000, 2000, drift, drift)
        await say(
            app,
            pilot,
            events.Measured(F16, report(F16)),
            events.JobDone(F16, LOSS_REMEDY.ask(None), found),
            events.Idle(),
        )
        assert f"a applies {DOWN[:20]}" in pane(app)
        assert "tried: SQNR 40.00 dB" in pane(app)
        assert "a keep the lost values" in flat(app)  # the line of keys
        await pilot.press("a")
        assert app.controller.experiment.recipe == F16.then(Rule(DOWN, "bfloat16"))
        assert engine(app).recipes[-1] == app.controller.experiment.recipe
        assert app.controller.experiment.results.loss_remedy is None


async def test_save_screen_warns_of_lost_values_before_an_export() -> None:
    async with launched() as (app, pilot):
        await cast(app, pilot, LOST)
        await pilot.press("e")
        plan = ExportPlan(1000, 1, (("float16", 3, 1000),), "loads", (), LOST)
        await say(app, pilot, events.ExportPlanned(F16, plan))
        assert SENTENCE in flat(app)
        plan = ExportPlan(1000, 1, (("float16", 3, 1000),), "loads", (), None)
        experiment = app.controller.experiment
        experiment.results = msgspec.structs.replace(experiment.results, losses=Losses())
        await say(app, pilot, events.ExportPlanned(F16, plan))
        assert "export checks whether" in flat(app)
        await say(app, pilot, events.CastDone(F16, LOST))
        assert SENTENCE in flat(app)


async def test_drift_pane_says_that_large_files_were_not_checked_for_lost_values() -> None:
    async with launched() as (app, pilot):
        await say(app, pilot, events.OpenFailed("no forward pass"))
        await cast(app, pilot, None, "640 GiB of values are not read automatically: m looks")
        assert "640 GiB of values are not read automatically: m looks" in pane(app)


async def test_lost_values_are_shown_for_files_without_a_live_model(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    state = {
        "conv.weight": torch.randn(64, 8, generator=torch.Generator().manual_seed(0)),
        "bn.running_var": torch.cat([torch.ones(64), torch.full((64,), 1e6)]),
        "tiny": torch.full((4, 5), 1e-9),
    }
    save_file(state, path)
    app = app_on("thread", str(path), Options(device="cpu"), recipe=F16)
    async with running(app) as pilot:
        await until(pilot, lambda: app.controller.experiment.results.loss_remedy is not None)
        await pilot.pause()
        app.clear_notifications()
        await pilot.pause()
        expected = {
            name: (int(tensor.half().isinf().sum()), int(((tensor != 0) & (tensor.half() == 0)).sum()))
            for name, tensor in load_file(path).items()
        }
        assert app.controller.experiment.results.losses.values is not None
        found = {
            loss.tensor: (loss.overflowed, loss.vanished) for loss in app.controller.experiment.results.losses.values
        }
        assert found == {name: counts for name, counts in expected.items() if any(counts)}
        await until(pilot, lambda: "bn.running_var: 64 of 128 values became infinite in float16" in pane(app))
        await until(pilot, lambda: "not tried: there is no live model to run" in pane(app))
        await pilot.press("a")
        await until(pilot, lambda: app.controller.experiment.results.losses.values == ())
        assert app.controller.experiment.plan.dtypes["bn.running_var"] == "bfloat16"
        assert app.controller.experiment.plan.dtypes["conv.weight"] == "float16"


async def test_large_files_are_checked_for_lost_values_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dtype_engine.service import planned_losses

    monkeypatch.setattr(planned_losses, "MAX_AUTOMATIC_BYTES", 100)
    path = tmp_path / "net.safetensors"
    save_file({"w": torch.full((64,), 1e6)}, path)
    source = locate(str(path))
    launch = Launch("net", None, recipe=F16)
    app = DtypeApp(launch, lambda emit, _: Worker(source, Options(device="cpu"), emit, read_headers=True))
    async with running(app) as pilot:
        await until(pilot, lambda: bool(app.controller.experiment.results.losses.reason))
        assert app.controller.experiment.results.losses.values is None
        await until(pilot, lambda: "m looks for those" in pane(app))
        await pilot.press("m")
        await until(pilot, lambda: app.controller.experiment.results.losses.values is not None)
        assert app.controller.experiment.results.losses.values == (ValueLoss("w", "float16", 64, 0, 64),)
