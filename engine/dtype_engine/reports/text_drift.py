"""Formats text about the noise floor, limits, causes of drift, and values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.units import decibels, plural
from dtype_engine.reports.text_table import table_lines
from dtype_engine.results.figures import main_text
from dtype_engine.results.meaning import meaning

if TYPE_CHECKING:
    from dtype_engine.results.attribution import AttributionReport, Contribution, NoiseFloor, NonFiniteDiagnosis
    from dtype_engine.results.drift import DriftReport, Extent, ModuleDrift, OutputDrift, PartialDrift
    from dtype_engine.results.rounding import HeldOut

_MOST_CAUSES = 12
_CANCELLING = 1.2
"""A cause is given as a percentage of the whole drift, unless a module alone causes more than this many times the whole drift:
drifts then cancel each other, and a percentage would mislead.
"""


def reference_words(reference: str) -> str:
    """Return words for the `reference` of a drift report, such as `the float32 reference` or `the weights of path/to/other`."""
    if reference in dtypes.BY_NAME:
        return f"the {reference} reference"
    if reference.startswith("outputs in "):
        return f"the {reference}"
    return f"the model {reference}" if reference.startswith("as stored") else f"the weights of {reference}"


def versus(reference: str) -> str:
    """Return short words for the `reference` of a drift, to stand beside a figure: `vs float32`, `vs stored bfloat16`."""
    if reference.startswith("as stored ("):
        return f"vs stored {reference.removeprefix('as stored (').removesuffix(')')}"
    return f"vs {printable(reference, 200)}"


def extent_text(extent: Extent) -> str:
    """Return words on the inputs that were measured, such as `2 of 6 sequences, 184 tokens`, and on padding that was left out."""
    whole = "sequence" if extent.of_tokens else "input"
    part = "token" if extent.of_tokens else "position"
    return f"{extent.done:,} of {plural(extent.total, whole)}, {plural(extent.positions, part)}{extent.left_out_text}"


def modules_extent_text(report: DriftReport) -> str:
    """Return the number of sequences on which modules were compared, as in `2 of 6 sequences`, or "" for all sequences."""
    extent = report.sequences
    if report.modules_sequences >= extent.total:
        return ""
    return f"{report.modules_sequences:,} of {plural(extent.total, 'sequence' if extent.of_tokens else 'input')}"


def partial_text(reading: PartialDrift) -> str:
    """Return the main figure of a running measurement so far: `KL 1.234e-03 ± 2e-05 nats, 2 of 6 sequences`."""
    output, extent = reading.output, reading.extent
    if not output.is_finite:
        return "not finite"
    return f"{main_text(output, extent)}, {extent_text(extent).split(',')[0]}"


WITHIN_KERNELS = "the drift is within what another kernel does: it is less than twice as large"


def floor_text(floor: NoiseFloor) -> str:
    """Return the noise floor as text: `KL 9.0e-13 nats, 128.0 dB`."""
    if not floor.ways:
        return "not known: this model's reference runs in only one way"
    kl = f"KL {floor.kl_mean:.1e} nats, " if floor.kl_mean is not None else ""
    ratio = "exact" if floor.sqnr_db == math.inf else f"{floor.sqnr_db:.1f} dB"
    return kl + ratio


def floor_lines(floor: NoiseFloor | None, output: OutputDrift, modules: Iterable[ModuleDrift] = ()) -> list[str]:
    """Return a line that rates the drift with a word such as "small", and a line with the noise floor if `floor` is given."""
    lines = [f"meaning    {meaning(output, floor, modules)}"]
    if floor is None:
        return lines
    lines.append(f"floor      {floor_text(floor)}")
    if floor.ways:
        lines[1] += f": the reference against itself, by {' and '.join(floor.ways)}, {floor.positions:,} positions"
    return lines


def kernel_lines(floor: NoiseFloor | None, output: OutputDrift) -> list[str]:
    """Return a line with the floor of the candidate in its own dtypes, and one that says whether the drift is within it."""
    if floor is None or not floor.ways:
        return []
    ways = f"{' and '.join(floor.ways)}, {floor.positions:,} positions"
    lines = [f"kernels    {floor_text(floor)}: the candidate against itself, by {ways}"]
    return [*lines, f"           {WITHIN_KERNELS}"] if floor.explains(output) else lines


def held_out_lines(found: HeldOut) -> list[str]:
    """Return a line with the drift on held-out inputs and, if the recipe has roundings, what it is without them."""
    lines = [f"held out   {main_text(found.output, found.extent)} on {printable(found.inputs)}"]
    if found.nearest is not None:
        lines.append(f"           without its roundings {main_text(found.nearest, found.extent)}")
    return lines


def nonfinite_lines(diagnosis: NonFiniteDiagnosis) -> list[str]:
    """Return lines that name the module in which values stop being finite, the cause, and rules that make the output finite."""
    lines = [f"not finite {first_sentence(diagnosis)}"]
    values = value_sentence(diagnosis)
    lines += [f"           {values}"] if values else []
    if diagnosis.remedy:
        rules = " ".join(printable(rule, 300) for rule in diagnosis.remedy)
        lines.append(f"remedy     {rules}: tried, {remedy_result(diagnosis)}")
    else:
        lines.append(f"remedy     none: {printable(diagnosis.reason, 400)}")
    return lines


def remedy_result(diagnosis: NonFiniteDiagnosis) -> str:
    """Return the effect of the remedy's rules, such as `the output is finite`. If the output is finite even without the rules,
    return the SQNR without and with them, as in `every module is finite, SQNR 20.00 dB → 40.00 dB`.
    """
    before, after = diagnosis.before, diagnosis.after
    if before is None or after is None or before.nonfinite:
        return "the output is finite" + (" where the reference is" if diagnosis.reason else "")
    return f"every module is finite, SQNR {decibels(before.sqnr_db)} → {decibels(after.sqnr_db)}"


def first_sentence(diagnosis: NonFiniteDiagnosis) -> str:
    """Return a sentence that names the first module and operation whose result is not finite."""
    where = diagnosis.module if diagnosis.operation else diagnosis.first_module
    module = printable(where, 300) or "the model itself"
    if not diagnosis.operation:
        return f"first in {module}"
    operation = f"a cast to {diagnosis.dtype}" if diagnosis.operation == "to" else printable(diagnosis.operation, 60)
    return f"first in {module}: {operation}" + (f" in {diagnosis.dtype}" if diagnosis.operation != "to" else "")


def value_sentence(diagnosis: NonFiniteDiagnosis) -> str:
    """Return a sentence about the values that the dtype can't hold, or "" if they are unknown or no dtype would hold them."""
    if diagnosis.constant is not None and diagnosis.limit is not None:
        if abs(diagnosis.constant) > 1:
            beyond = f"is beyond the range of {diagnosis.dtype}, which holds up to {diagnosis.limit:.5g}"
            return f"the constant {diagnosis.constant:g}, as masks have, {beyond}"
        return f"the epsilon {diagnosis.constant:g} is zero in {diagnosis.dtype}, so that it divides by zero"
    if diagnosis.limit is None or diagnosis.largest is None or diagnosis.kind == "reference":
        return ""
    limit = f"{diagnosis.dtype} holds up to {diagnosis.limit:.5g}"
    if diagnosis.kind == "weight":
        names = ", ".join(printable(name, 200) for name in diagnosis.weights)
        return f"{names} has values up to {diagnosis.largest:.4g}; {limit}"
    given = f"its inputs reach {diagnosis.largest:.4g}"
    gives = f", its result in the reference {diagnosis.largest_reference:.4g}" if diagnosis.largest_reference else ""
    return f"{given}{gives}; {limit}"


def causes_headline(report: AttributionReport) -> str:
    """Return a sentence on the main cause: `62 % of the output's drift enters at model.layers.1.mlp.down_proj`."""
    if report.whole == 0:
        return f"the weights' dtypes change nothing in the output over these {report.positions:,} positions"
    if not report.causes:
        return "the output drifts, but no module uses a weight in another dtype than the reference"
    first = report.causes[0]
    name = printable(first.name, 300) or "the model itself"
    if first.share is None:
        return f"the output is not finite; with {name} alone as cast " + (
            "it is not either" if math.isinf(first.drift) else f"it drifts by {first.drift:.3e} {report.unit}"
        )
    whose = f"the {first.modules} modules of {name}" if first.modules > 1 else name
    if first.share > _CANCELLING:
        return f"{name} drifts most by itself, {first.share:.1f} times as much as the whole: errors cancel each other"
    return f"{share_words(first)} of the output's drift enters at {whose}"


def share_words(contribution: Contribution) -> str:
    """Return a contribution as a percentage of the whole drift, or `-` if the percentage is unknown."""
    return "-" if contribution.share is None else f"{100 * contribution.share:.1f} %"


def causes_footing(report: AttributionReport) -> str:
    """Return a sentence that compares the drift of the whole recipe with the sum of the drifts that single modules cause."""
    comparable = report.whole and math.isfinite(report.whole)
    together = f", {100 * report.together / report.whole:.0f} % of it" if comparable else ""
    return (
        f"as cast {report.whole:.3e} {report.unit} over {report.positions:,} positions; "
        f"modules one at a time add up to {report.together:.3e}{together}"
    )


def causes_text(report: AttributionReport) -> str:
    """Return the sentences of `causes_headline` and `causes_footing`, and a table of the modules that cause the most drift."""
    lines = [f"causes     {causes_headline(report)}", f"           {causes_footing(report)}"]
    if not report.causes:
        return lines[0]
    shown = report.causes[:_MOST_CAUSES]
    rows = [("module, alone as cast", "of the whole", "     drift", "its own output")]
    rows += [
        (
            cause_label(cause), share_words(cause), f"{cause.drift:.3e}",
            "-" if cause.local_sqnr_db is None else decibels(cause.local_sqnr_db),
        )
        for cause in shown
    ]  # fmt: skip
    lines += table_lines(rows, (1, 2), indent="  ")
    if len(report.causes) > _MOST_CAUSES:
        lines.append(f"  and {len(report.causes) - _MOST_CAUSES} more, each at most {shown[-1].drift:.3e}")
    return "\n".join(lines)


def cause_label(contribution: Contribution) -> str:
    """Return the name of a module, or the name of a subtree and its number of modules."""
    name = printable(contribution.name, 200) or "the model itself"
    return f"{name} ({contribution.modules} modules)" if contribution.modules > 1 else name
