"""Weights without an architecture: nothing promises what will never come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.helpers.recording_engine import launched, say
from tests.helpers.screen_text import notices, screen, until
from textual.pilot import Pilot

from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe.presets import PRESETS
from dtype_engine.service import events
from dtype_tui.app import DtypeApp

WHY = "no forward pass: nothing says which architecture these weights belong to"


@asynccontextmanager
async def planning(height: int = 24) -> AsyncIterator[tuple[DtypeApp, Pilot[None]]]:
    tensors = (TensorInfo("a.weight", (8, 8), "float32"), TensorInfo("a.steps", (4,), "int64"))
    async with launched(Tree(tensors), "net.safetensors", size=(80, height)) as (app, pilot):
        await say(app, pilot, events.OpenFailed(WHY), events.Idle())
        yield app, pilot


async def test_details_without_an_architecture_say_that_the_class_is_unknown() -> None:
    async with planning() as (app, pilot):
        await pilot.press("enter")
        await pilot.pause()
        await until(pilot, lambda: "class       unknown: no file names the architecture" in screen(app))
        assert "parameters  68 " in screen(app)
        assert "(68)" not in screen(app)


async def test_details_say_that_the_class_is_known_after_loading() -> None:
    async with launched(size=(80, 24)) as (app, pilot):
        await pilot.press("enter")
        await pilot.pause()
        await until(pilot, lambda: "known when the model is loaded" in screen(app))


async def test_dtype_percentages_in_the_details_are_labeled_as_bytes() -> None:
    async with planning() as (app, pilot):
        await pilot.press("enter")
        await pilot.pause()
        await until(pilot, lambda: "288 B  f32 89 % · i64 11 % of the bytes" in screen(app))


async def test_presets_that_need_classes_say_so_until_the_model_is_loaded() -> None:
    async with planning(40) as (app, pilot):
        await pilot.press("p")
        await until(pilot, lambda: len(app.screen.effects) == len(PRESETS))  # type: ignore[attr-defined]
        await pilot.pause()
        shown = {
            line.split("│")[1].split()[0]: line
            for line in screen(app).splitlines()
            if "once the model has loaded" in line
        }
        assert set(shown) == {name for name, preset in PRESETS.items() if preset.needs_classes}
        idle = [line for line in screen(app).splitlines() if "nothing to do here" in line]
        assert all("kv-declared" in line for line in idle)


@pytest.mark.parametrize("key", ["o", "s"])
async def test_scan_keys_without_a_forward_pass_say_why_there_is_no_scan(key: str) -> None:
    async with planning() as (app, pilot):
        await pilot.press(key)
        await pilot.pause()
        assert WHY in notices(app)[-1]
        assert "s starts one" not in notices(app)[-1]
