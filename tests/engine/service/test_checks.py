"""Values of events that no engine sends are refused before the app draws them."""

from __future__ import annotations

import dataclasses

import pytest
from tests.helpers.recording_engine import report

from dtype_engine import Recipe
from dtype_engine.core.options import RunSettings
from dtype_engine.results.losses import ValueLoss
from dtype_engine.service import events
from dtype_engine.service.messages import check_event
from dtype_engine.service.save_requests import ExportPlan


def with_losses(*losses: ValueLoss) -> list[events.Event]:
    """Every event that lists the values that casts lose."""
    told = dataclasses.replace(report(Recipe()), lost=losses)
    return [
        events.CastDone(Recipe(), losses),
        events.Measured(Recipe(), told),
        events.RecipeMeasured(told, RunSettings()),
        events.ExportPlanned(Recipe(), ExportPlan(1, 1, (), "", lost=losses)),
    ]


@pytest.mark.parametrize("index", range(4))
def test_empty_tensor_loses_no_values(index: int) -> None:
    check_event(with_losses(ValueLoss("w", "float16", overflowed=1, vanished=0, elements=1))[index])
    with pytest.raises(ValueError, match="w loses values and has none"):
        check_event(with_losses(ValueLoss("w", "float16", overflowed=1, vanished=0, elements=0))[index])
