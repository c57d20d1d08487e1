"""The acceptance of a draft head in the details of a measurement."""

from __future__ import annotations

import dataclasses

import pytest
from tests.helpers.recording_engine import launched, report, say
from tests.helpers.scenes import ready

from dtype_engine import Recipe, Rule
from dtype_engine.results.draft_head import DraftAcceptance
from dtype_engine.service import events
from dtype_tui.state.full_rows import drift_rows

BF16 = Recipe((Rule("*", "bfloat16"),))
SEVERAL = DraftAcceptance(reference=0.612, candidate=0.608, reference_se=0.0131, candidate_se=0.0129, positions=1480)
ONE = DraftAcceptance(reference=1.0, candidate=0.5, reference_se=None, candidate_se=None, positions=1)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (SEVERAL, "acceptance 61.20 ± 1.3 % → 60.80 ± 1.3 %; first draft layer, 1,480 positions"),
        (ONE, "acceptance 100.00 % → 50.00 %; first draft layer, 1 position"),
        (None, None),
    ],
    ids=["several positions", "one position", "not measured"],
)
async def test_details_have_the_acceptance_of_the_draft_head(found: DraftAcceptance | None, words: str | None) -> None:
    async with launched(size=(120, 36)) as (app, pilot):
        await ready(app, pilot)
        app.controller.apply_recipe(BF16)
        told = dataclasses.replace(report(BF16), draft=found)
        await say(app, pilot, events.Measured(BF16, told), events.Idle())
        assert dict(drift_rows(app.controller.experiment)).get("draft head") == words
