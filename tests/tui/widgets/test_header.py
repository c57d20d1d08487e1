"""The line at the top, and the lines at the bottom: what they say in which width, and what a click on a key does."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from tests.helpers.recording_engine import make_app, report, say
from tests.helpers.scenes import mixed, opened, ready
from tests.helpers.screen_text import lines

from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.results.drift import ModuleDrift
from dtype_engine.service import events
from dtype_tui.rendering.cells import short_bytes
from dtype_tui.screens.history import MeasurementsScreen
from dtype_tui.widgets.header import header_line
from dtype_tui.widgets.tree_columns import columns_for


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "shown", "left_out"),
    [
        (160, ("LlamaForCausalLM", "707.8 k params", "cpu", "1.2 of 2.7 MiB", "55 % less", "KL 2.50e-4", "top-1"), ()),
        (120, ("LlamaForCausalLM", "707.8 k params", "cpu", "1.2 of 2.7 MiB", "55 % less", "KL 2.50e-4"), ("top-1",)),
        (80, ("cpu", "1.2 of 2.7 MiB", "55 % less", "KL 2.50e-4"), ("Llama", "params")),
        (60, ("cpu", "1.2 of 2.7 MiB", "KL 2.50e-4"), ("params",)),
        (40, ("1.2 of 2.7 MiB",), ("KL", "params")),
    ],
)
async def test_narrow_header_keeps_the_most_important_parts(
    width: int, shown: tuple[str, ...], left_out: tuple[str, ...]
) -> None:
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await mixed(app, pilot)
        line = header_line(app.controller.experiment, width).plain
        assert line.startswith(" demo ")
        assert " small " in line
        assert all(words in line for words in shown)
        assert not any(words in line for words in left_out)
        assert len(line) == width


async def test_control_characters_in_the_title_are_escaped() -> None:
    app = make_app(title="\x1b]0;owned\x07" + "x" * 100)
    async with app.run_test(size=(120, 36)):
        assert "\x1b" not in header_line(app.controller.experiment, 120).plain
        assert "x" * 10 in lines(app)[0]


@pytest.mark.slow
async def test_click_on_a_key_in_the_status_line_acts_like_the_key() -> None:
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(app, pilot)
        app.controller.experiment.measured = ()
        await mixed(app, pilot)
        rules = len(app.controller.experiment.recipe.rules)
        await pilot.click("#keys", offset=(lines(app)[-1].index("undo"), 0))
        await pilot.pause()
        assert len(app.controller.experiment.recipe.rules) != rules
        await pilot.click("#status", offset=(lines(app)[-2].index("history"), 0))
        await pilot.pause()
        assert isinstance(app.screen, MeasurementsScreen)


@pytest.mark.parametrize("width", [38, 60, 80, 100, 133])
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("compares", [False, True])
@pytest.mark.parametrize("needed", [(14, 24), (37, 60), (90, 120)])
def test_tree_columns_fit_and_leave_room_for_names(
    width: int, scanned: bool, compares: bool, needed: tuple[int, int]
) -> None:
    columns = columns_for(width, needed, scanned=scanned, compares=compares)
    assert columns.name + columns.numbers <= width
    assert columns.name >= min(needed[0], 2 * width // 5) - 1
    if width >= 80:
        assert columns.drift
        assert bool(columns.scan) == scanned
        assert bool(columns.change) == compares
    assert bool(columns.parameters) <= (width >= 92)


async def test_drift_bars_use_the_range_of_the_drift_within_the_model() -> None:
    app = make_app()
    readings = tuple(ModuleDrift(f"model.layers.{i}", 54.0 - 2 * i, 0.1, 0) for i in range(6))
    async with app.run_test(size=(120, 36)) as pilot:
        await ready(app, pilot)
        await pilot.press("F")
        experiment = app.controller.experiment
        await say(app, pilot, events.Measured(experiment.recipe, report(experiment.recipe, modules=readings)))
        assert experiment.results.sqnr_range[1] == 54.0
        drawn = [
            line
            for line in lines(app)
            if any(f" {54.0 - 2 * i:.1f} " in line for i in range(6)) and "▾ layers" not in line
        ]
        halves = [2 * line[50:].count("▄") + line[50:].count("▖") for line in drawn]
        assert len(drawn) == 6
        assert halves == sorted(halves)
        assert halves[-1] - halves[0] >= 3


@pytest.mark.parametrize("rows", [2600, 2667])
async def test_numbers_in_the_columns_of_the_tree_never_touch(rows: int) -> None:
    tensors = [TensorInfo(f"layers.{layer}.weight", (rows, 97), "float32") for layer in range(3)]
    packed = replace(tensors[0], name="packed", logical_numel="unknown")
    async with opened(tree=Tree([*tensors, packed]), size=(200, 50)) as (app, _):
        tree = app.main.tree_view
        bounds = list(accumulate((tree._columns.name, tree._columns.dtype, tree._columns.parameters)))
        for y in range(1, len(tree.rows) + 1):
            line = tree.line(y).text
            assert all(line[bound] == " " for bound in bounds), line


def test_sizes_have_at_most_nine_cells() -> None:
    sizes = [int(1024**power * share) for power in range(1, 5) for share in (0.9764, 0.9771, 0.99, 0.99999, 1, 1.5)]
    assert max(len(short_bytes(size)) for size in sizes) <= 9
    assert short_bytes(1024512) == "1000 KiB"
    assert short_bytes(1023897) == "999.9 KiB"


@pytest.mark.parametrize("width", [92, 120, 200])
def test_columns_leave_a_blank_before_the_longest_numbers(width: int) -> None:
    columns = columns_for(width, compares=True)
    assert columns.parameters > len("> 707.8 k") or not columns.parameters
    assert columns.size > len("999.9 KiB")
    assert min(columns.drift, columns.other or 99) > len("inf/nan")
