"""The worker on a model that is larger than the memory: every further pass reads all weights from the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from tests.helpers.recorded_worker import RecordedEngine

from dtype_engine import Options, Recipe, Rule
from dtype_engine.worker import events
from dtype_engine.worker.commands import SetRecipe

BF16 = Recipe((Rule.parse("*=bf16"),))


@pytest.mark.parametrize("floor", ["auto", "always"])
def test_the_noise_floor_is_measured_only_on_request(
    make_llama: Callable[..., Path], floor: Literal["auto", "always"]
) -> None:
    folder = make_llama(vocab_size=512, hidden_size=256, intermediate_size=512)
    options = Options(over_memory=True, max_memory={"cpu": 1 << 21}, sequences=2, floor=floor)
    with RecordedEngine("thread", str(folder), options) as recorded:
        recorded.wait_for(events.Idle)
        recorded.worker.request(SetRecipe(BF16))
        report = recorded.measured(BF16).report
        recorded.wait_for(events.Idle, since=recorded.events.index(recorded.measured(BF16)))
        assert bool(recorded.of(events.NoiseFloorMeasured)) == (floor == "always")
    read, lost = report.memory.read_bytes, recorded.of(events.CastDone)[-1].lost
    assert read is not None
    assert read > 0
    assert lost == report.lost
