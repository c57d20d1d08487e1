"""Groups of positions in the app: the word of the Drift pane, the details, the comparison, and saved sessions."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from tests.helpers.recording_engine import launched, report, say
from tests.helpers.scenes import ready
from tests.helpers.screen_text import lines, screen
from textual.pilot import Pilot

from dtype_engine import Recipe, Rule, RunSettings
from dtype_engine.results.drift import DriftReport
from dtype_engine.results.groups import Groups, PositionGroup
from dtype_engine.service import events
from dtype_tui.app import DtypeApp
from dtype_tui.state.full_rows import drift_rows
from dtype_tui.state.measurement_log import measured
from dtype_tui.state.session_store import SavedSession, SessionFile, read_session

BF16, F16 = (Recipe((Rule("*", dtype),)) for dtype in ("bfloat16", "float16"))
QUIET: Groups = {
    "confidence": {
        "0-0.25": PositionGroup(60, 4e-4, 1e-5, 0.96, 0.9),
        "0.95-1": PositionGroup(40, 2.5e-5, None, 0.04, 1.0),
    },
    "position": {"1": PositionGroup(6, 1e-4, 2e-5, 0.1, 1.0), "65-128": PositionGroup(94, 6.5e-4, 2e-5, 0.9, 0.9)},
}
LOUD: Groups = {**QUIET, "confidence": {"0.95-1": PositionGroup(40, 6.5e-4, 1e-5, 0.4, 0.975)}}
"""The mean KL of the confident group is above 2.5e-4, the mean over all positions."""


def told(recipe: Recipe, groups: Groups) -> DriftReport:
    found = report(recipe)
    return dataclasses.replace(found, output=dataclasses.replace(found.output, groups=groups))


async def show(app: DtypeApp, pilot: Pilot[None], recipe: Recipe, groups: Groups) -> None:
    app.controller.apply_recipe(recipe)
    await say(app, pilot, events.Measured(recipe, told(recipe, groups)), events.Idle())


@pytest.mark.parametrize("size", [(80, 24), (120, 36), (60, 15), (200, 50)])
async def test_drift_pane_has_a_word_about_the_confident_group_and_no_line_more(size: tuple[int, int]) -> None:
    async with launched(size=size) as (app, pilot):
        await ready(app, pilot)
        pages = []
        for recipe, groups in ((BF16, {}), (F16, QUIET), (BF16, LOUD)):
            await show(app, pilot, recipe, groups)
            pages.append(lines(app))
        without, quiet, loud = ("\n".join(page) for page in pages)
        assert "confident" not in without + quiet
        if size != (60, 15):  # which has no room for this line
            assert re.search(r"KL p99 +1\.5e-3", quiet)
            assert re.search(r"confident +6\.5e-4", loud)
            assert "KL p99" not in loud
        filled = [sum(bool(line.strip()) for line in page) for page in pages]
        assert filled[0] == filled[1] == filled[2]


async def test_details_of_the_model_list_all_groups() -> None:
    async with launched() as (app, pilot):
        await ready(app, pilot)
        await show(app, pilot, BF16, QUIET)
        rows = dict(drift_rows(app.controller.experiment))
        assert rows["confidence 0.95–1"] == "KL 2.50e-05, 4.0 % of all; top-1 100.00 % of 40"
        assert rows["position 65–128"] == "KL 6.50e-04, 90.0 % of all; top-1 90.00 % of 94"


async def test_comparison_shows_the_groups_of_both_recipes() -> None:
    async with launched(size=(200, 50)) as (app, pilot):
        await ready(app, pilot)
        await show(app, pilot, BF16, QUIET)
        await show(app, pilot, F16, LOUD)
        await pilot.press("H")
        await pilot.pause()
        await pilot.press("c", "j", "c")
        await pilot.pause()
        assert re.search(r"confidence 0\.95–1 +6\.50e-04 +2\.50e-05 +97\.50 % +100\.00 %", screen(app))
        assert re.search(r"position 65–128 +6\.50e-04 +6\.50e-04 +90\.00 % +90\.00 %", screen(app))
        assert "confidence 0–0.25" not in screen(app)


def saved_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: Groups) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = SessionFile()
    file.save(SavedSession(model=None, title="demo", measured=(measured(told(BF16, groups), BF16, RunSettings(), 1),)))
    return file.path


def test_saved_session_keeps_the_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved_session(tmp_path, monkeypatch, LOUD)
    (entry,) = read_session(path).measured
    assert entry.output == told(BF16, LOUD).output


def test_session_without_groups_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved_session(tmp_path, monkeypatch, LOUD)
    file = json.loads(path.read_text())
    del file["measured"][0]["output"]["groups"]
    path.write_text(json.dumps(file))
    (entry,) = read_session(path).measured
    assert entry.output == report(BF16).output


def test_unknown_groups_of_a_session_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strange = {
        "tea": {"\x1b[2J": PositionGroup(1, 1.0, None, None, 1.0)},
        "position": {"\x1b[2J": PositionGroup(1, 1.0, None, None, 1.0)},
    }
    path = saved_session(tmp_path, monkeypatch, strange)
    (entry,) = read_session(path).measured
    from dtype_engine.reports.text_groups import group_words

    assert group_words(entry.output) == []
