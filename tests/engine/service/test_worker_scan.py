"""Scans on the engine: streaming estimates, pausing, stopping, going on."""

from __future__ import annotations

from tests.helpers.recorded_worker import RecordedEngine

from dtype_engine import Recipe, Rule
from dtype_engine.service import events
from dtype_engine.service.commands import Cancel, Pause, Scan, SetRecipe


def test_newer_recipe_interrupts_a_scan_which_then_continues(demo: RecordedEngine) -> None:
    demo.wait_for(events.Idle)
    start = len(demo.events)
    demo.worker.request(Scan(("int8",)))
    demo.wait_for(events.ScanUpdated, since=start)
    recipe = Recipe((Rule("*.mlp", "bfloat16"),))
    demo.worker.request(SetRecipe(recipe))
    measured = demo.events.index(demo.measured(recipe, start))
    demo.wait_for(events.ScanUpdated, lambda event: event.finished, measured)
    counts = [event.report.sequences for event in demo.of(events.ScanUpdated)]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_paused_scan_can_be_cancelled_and_the_next_is_not_paused(short: RecordedEngine) -> None:
    short.wait_for(events.Idle)
    start = len(short.events)
    short.worker.request(Pause(True))
    short.worker.request(Scan(("int8",)))
    short.worker.request(Cancel())
    short.worker.request(Pause(True))
    short.worker.request(Scan(("int8",)))
    short.worker.request(Cancel())
    short.worker.request(Scan(("int8",)))
    short.wait_for(events.ScanUpdated, lambda event: event.finished, start)
