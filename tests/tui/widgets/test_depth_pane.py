"""The plot of drift over depth below the tree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.helpers.recording_engine import report, say
from tests.helpers.scenes import history, measuring, mixed, modules, opened
from tests.helpers.screen_text import screen

from dtype_engine.recipe import Recipe, Rule
from dtype_engine.results.drift import ModuleDrift
from dtype_engine.service import events
from dtype_tui.app import DtypeApp

BF16 = Recipe((Rule("*", "bfloat16"),))


def drawn(app: DtypeApp) -> list[str]:
    pane = app.main.depth
    return [pane.render_line(y).text for y in range(pane.size.height)]


def dots(app: DtypeApp) -> int:
    return sum(0x2800 < ord(character) < 0x2900 for line in drawn(app) for character in line)


async def test_depth_plot_marks_and_names_the_worst_module() -> None:
    async with opened(mixed) as (app, _):
        rows = drawn(app)
        assert "▲ layers.5 mlp.down_proj  28.50 dB" in "".join(rows)
        (mark,) = [line.index("○") for line in rows if "○" in line]
        assert mark > 70, "at the last layer"
        first = next(line for line in rows if any(0x2800 < ord(character) < 0x2900 for character in line))
        assert first.index("│", 2) < 12
        assert "50 dB" in "".join(rows)
        assert "layers.0" in rows[-2]


async def test_axis_of_the_depth_plot_includes_the_worst_module() -> None:
    async with opened() as (app, pilot):
        app.controller.apply_recipe(BF16)
        found = (ModuleDrift("model.layers.0", 50.0, 1e-3, 0), ModuleDrift("model.layers.0.mlp", 20.0, 1e-2, 0))
        await say(app, pilot, events.Measured(BF16, report(BF16, 1e-3, found)), events.Idle())
        rows = drawn(app)
        (mark,) = [y for y, line in enumerate(rows) if "○" in line]
        assert all(y < mark for y, line in enumerate(rows) if any(0x2800 < ord(each) < 0x2900 for each in line))
        assert "▲ layers.0 mlp  20.00 dB" in "".join(rows)


async def test_layer_at_the_rounding_of_float32_takes_no_height_from_the_others() -> None:
    layers = tuple(ModuleDrift(f"model.layers.{layer}", 50.0 - 5 * layer, 1e-3, 0) for layer in range(6))
    shown = []
    for found in (layers, (ModuleDrift("model.embed_tokens", 153.0, 1e-9, 0), *layers)):
        async with opened() as (app, pilot):
            app.controller.apply_recipe(BF16)
            await say(app, pilot, events.Measured(BF16, report(BF16, 1e-3, found)), events.Idle())
            shown.append([line[:8] for line in drawn(app)[1:-2]])
    assert shown[0] == shown[1]
    assert "50 dB" in "".join(shown[0])


async def test_drifts_that_are_all_as_small_as_the_rounding_of_float32_are_plotted() -> None:
    """As those of a model in float64 that is cast to float32."""
    async with opened() as (app, pilot):
        app.controller.apply_recipe(BF16)
        found = tuple(ModuleDrift(f"model.layers.{layer}", 150.0 - 2 * layer, 1e-8, 0) for layer in range(6))
        await say(app, pilot, events.Measured(BF16, report(BF16, 1e-15, found)), events.Idle())
        assert dots(app) > 20
        assert "▲ layers.5  140.00 dB" in "".join(drawn(app))


async def test_mark_of_the_worst_module_is_joined_to_the_curve() -> None:
    async with opened() as (app, pilot):
        app.controller.apply_recipe(BF16)
        layers = tuple(ModuleDrift(f"model.layers.{layer}", 50.0, 1e-3, 0) for layer in range(6))
        found = (*layers, ModuleDrift("model.layers.3.mlp", 20.0, 1e-2, 0))
        await say(app, pilot, events.Measured(BF16, report(BF16, 1e-3, found)), events.Idle())
        rows = drawn(app)
        ((mark, column),) = [(y, line.index("○")) for y, line in enumerate(rows) if "○" in line]
        curve = next(y for y, line in enumerate(rows) if 0x2800 < ord(line[20]) < 0x2900)
        assert mark > curve + 2
        assert all(0x2800 < ord(rows[y][column]) < 0x2900 for y in range(curve, mark))


async def test_depth_plot_grows_while_modules_are_measured() -> None:
    async with opened() as (app, pilot):
        assert dots(app) == 0
        await measuring(app, pilot)
        some = dots(app)
        assert some > 0
        recipe = app.controller.experiment.recipe
        await say(app, pilot, events.ModulesMeasured(recipe, modules()))
        assert dots(app) > some


async def test_depth_plot_has_a_second_line_for_the_previous_recipe() -> None:
    async with opened(mixed) as (app, pilot):
        alone = dots(app)
        better = tuple(replace(drift, sqnr_db=drift.sqnr_db + 20) for drift in modules() if drift.sqnr_db is not None)
        app.controller.apply_recipe(BF16)
        await say(app, pilot, events.Measured(BF16, report(BF16, modules=better)), events.Idle())
        assert dots(app) > alone + 20


@pytest.mark.slow
async def test_pinned_recipe_replaces_the_previous_one_in_the_depth_plot() -> None:
    async with opened(history) as (app, pilot):
        await pilot.press("j", "P", "escape")
        await pilot.pause()
        assert app.controller.experiment.baseline is not None
        assert app.main.depth._other_modules() == app.controller.experiment.baseline_modules


async def test_depth_plot_marks_nonfinite_layers() -> None:
    async with opened() as (app, pilot):
        app.controller.apply_recipe(BF16)
        broken = (*modules()[:-1], ModuleDrift("model.layers.5", None, 9.9, 4))
        await say(app, pilot, events.Measured(BF16, report(BF16, modules=broken)), events.Idle())
        assert any("✗" in line for line in drawn(app))
        await say(app, pilot, events.OpenFailed("no architecture"))
        assert "Drift over depth" not in screen(app)


async def test_depth_plot_is_colored_by_how_large_the_drift_is() -> None:
    async with opened(mixed) as (app, _):
        pane = app.main.depth
        strips = [pane.render_line(y) for y in range(pane.size.height)]
        dotted = [segment for strip in strips for segment in strip if any("⠀" < each < "⣿" for each in segment.text)]
        colours = {segment.style.color.name for segment in dotted if segment.style and segment.style.color}
        assert {"bright_yellow", "yellow"} <= colours
