"""Writes the beginning of a report: tiles about size, drift and speed, and one sentence on the bytes that the rules save and the
drift.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtype_engine.core.text import printable
from dtype_engine.core.tree import Totals
from dtype_engine.core.units import human_bytes, percent
from dtype_engine.recipe import Plan
from dtype_engine.reports.blocks import Tile
from dtype_engine.reports.text import mix_text, speed_cells
from dtype_engine.reports.text_drift import first_sentence, reference_words
from dtype_engine.reports.text_losses import headline
from dtype_engine.results.attribution import NonFiniteDiagnosis
from dtype_engine.results.drift import DriftReport
from dtype_engine.results.figures import FIGURES, main_text, not_always_measured
from dtype_engine.results.losses import ValueLoss
from dtype_engine.results.meaning import GRADES, meaning
from dtype_engine.results.runs import SpeedReport

_MOST_RULES = 3


def size_tile(stored: int, planned: int, caches: str = "") -> Tile:
    """Return the tile about size. caches: words about the KV cache, or "" if the recipe gives it no format."""
    more = (f"KV cache {caches}",) if caches else ()
    if stored == planned:
        return Tile("size", human_bytes(stored), ("as stored", *more))
    return Tile("size", f"{human_bytes(planned)} of {human_bytes(stored)}", (_change(stored, planned), *more))


def _change(stored: int, planned: int) -> str:
    if not stored:
        return "nothing stored"
    return f"{percent(abs(planned - stored) / stored)} % {'less' if planned < stored else 'more'}"


def verdict_tile(drift: DriftReport | None, no_drift: str = "", nonfinite: NonFiniteDiagnosis | None = None) -> Tile:
    """Return the tile about drift: the word that rates the drift, and the metrics behind the word. no_drift: why `drift` is
    None.
    """
    if drift is None:
        return Tile("drift", "not measured", (printable(no_drift, 200) or "no forward pass was run",))
    output, said = drift.output, meaning(drift.output, None, drift.modules)
    extent, top1 = drift.sequences, FIGURES["top1_agreement"]
    details = [main_text(output, extent) if output.is_finite else f"not finite: {output.nonfinite_text}"]
    if output.top1_agreement is not None:
        details.append(f"{top1.label_in('report', extent.of_tokens)}: {top1.form(output.top1_agreement)}")
    details += [f"{row.label}: {row.in_column(output)}" for row in not_always_measured([output])]
    details += [f"{printable(change.name)} {change.short}" for change in drift.metrics[:2]]
    details.append(said.why)
    if nonfinite is not None:  # a module may be, although the output is finite
        details.append(f"values stop being finite {first_sentence(nonfinite)}")
    return Tile("drift", said.word, tuple(details), GRADES[said.word])


def third_tile(planned: Totals, speed: SpeedReport | None) -> Tile:
    """Return the tile about the candidate's speed or, if the speed was not measured, about the parameters."""
    row = next((row for row in speed.rows if row.what == "candidate"), None) if speed is not None else None
    if speed is None or row is None:
        return Tile("parameters", planned.parameters_text, (mix_text(planned) if planned.nbytes else "no weights",))
    time, *more = speed_cells(row, speed)
    value = next((cell for cell in more if " x " in cell), time)
    details = tuple(cell for cell in (time, *more) if cell != value)
    return Tile(f"speed against the {speed.rows[0].what}", value, details)


def plain_sentence(
    title: str,
    plan: Plan,
    drift: DriftReport | None,
    no_drift: str,
    losses: Sequence[ValueLoss] | None,
    caches: str = "",
) -> str:
    """Return one sentence about the model, the rules, the bytes that they save, and the drift. no_drift: why `drift` is None.
    losses: None if not counted. caches: words about the KV cache, or "".
    """
    name, rules = printable(title, 60), plan.recipe.rules
    stored, planned = human_bytes(plan.stored_bytes), human_bytes(plan.planned_bytes)
    if not rules:
        words = f"{name} takes {stored} as it is stored"
    else:
        shown = ", ".join(printable(str(rule), 100) for rule in rules[:_MOST_RULES])
        more = f" and {len(rules) - _MOST_RULES} more" if len(rules) > _MOST_RULES else ""
        words = f"With the rule{'s' if len(rules) > 1 else ''} {shown}{more}, {name} takes "
        if plan.stored_bytes == plan.planned_bytes:
            words += f"{stored}, as much as stored"
        else:
            words += f"{planned} instead of {stored} ({_change(plan.stored_bytes, plan.planned_bytes)})"
        words += f", and its KV cache {caches}" if caches else ""
    if drift is None:
        words += f"; its drift was not measured: {(printable(no_drift, 1000) or 'no forward pass was run').rstrip('.')}"
    else:
        said = meaning(drift.output, None, drift.modules)
        words += f"; its drift from {reference_words(drift.reference)} is {said.word} ({said.why})"
    if lost := headline(losses or ()):
        words += f"; in the casts, {lost}"
    return words + "."
