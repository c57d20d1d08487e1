"""What `drift` tells beside the figures: the floor, the causes, why values are not finite, and limits that were missed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtype_engine.cli.program import say
from dtype_engine.results.attribution import AttributionReport, Floor, NonFiniteDiagnosis
from dtype_engine.results.drift import DriftReport, as_json
from dtype_engine.results.losses import LossRemedy, severe
from dtype_engine.results.thresholds import Verdict

if TYPE_CHECKING:
    from dtype_engine.runtime.session import Session

MISSED = 1


@dataclass(frozen=True, slots=True)
class More:
    """The answers to what was asked about one report."""

    floor: Floor
    nonfinite: NonFiniteDiagnosis | None
    causes: AttributionReport | None
    noise: bool
    asked_for_remedy: bool
    remedy: LossRemedy | None

    def as_json(self) -> dict[str, Any]:
        """As keys of the report's object."""
        found = {"floor": as_json(self.floor), "under_floor": self.noise, "nonfinite": as_json(self.nonfinite)}
        found |= {"suggest": as_json(self.remedy)} if self.asked_for_remedy else {}
        return found | ({"causes": as_json(self.causes)} if self.causes is not None else {})

    def text(self, report: DriftReport, found: Sequence[Verdict]) -> str:
        """As lines under the report's."""
        from dtype_engine.reports.text_drift import causes_text, floor_lines, nonfinite_lines, verdict_lines
        from dtype_engine.reports.text_losses import remedy_lines

        lines = floor_lines(self.floor, report.output)
        lines += nonfinite_lines(self.nonfinite) if self.nonfinite is not None else []
        if self.asked_for_remedy:
            lines += remedy_lines(self.remedy)
        elif severe(report.lost):
            lines.append("           --suggest tries rules that keep the values that the casts lose")
        lines += [causes_text(self.causes)] if self.causes is not None else []
        return "\n".join([*lines, *verdict_lines(found)])


def look_closer(session: Session, report: DriftReport, causes: bool, suggest: bool) -> More:
    """Measure the floor, look for the first value that is not finite where there is one, and tell causes, and what keeps the
    values that casts lose, where asked to.
    """
    floor = session.floor(lambda done, total: say("the reference against itself"))
    nonfinite = session.nonfinite(report, lambda done, total: say(f"trying remedies: {done + 1} of {total}"))
    told = session.causes(lambda done, total: say(f"causes: {done} of {total}")) if causes else None
    remedy = session.loss_remedy(report, lambda done, total: say("trying what keeps the values")) if suggest else None
    return More(floor, nonfinite, told, floor.hides(report.output), suggest, remedy)


def fail_where_missed(found: Sequence[Verdict]) -> int:
    """Say on standard error which limits were missed; the exit status."""
    missed = [verdict for verdict in found if not verdict.passed]
    for verdict in missed:
        option = "--" + verdict.name.replace("_", "-")
        print(f"dtype-engine: {option} is missed: {verdict}", file=sys.stderr)
    return MISSED if missed else 0
