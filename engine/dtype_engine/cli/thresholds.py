"""Limits on the drift, as options of `dtype-engine` and `dtype-tui`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from dtype_engine.cli.options import with_options
from dtype_engine.cli.program import NO, print_stderr
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import evaluation
from dtype_engine.core.text import printable
from dtype_engine.results.figures import FIGURES
from dtype_engine.results.groups import group_named, limit_name
from dtype_engine.results.thresholds import Limit

if TYPE_CHECKING:
    from dtype_engine.results.drift import DriftReport
    from dtype_engine.results.figures import Figure


def _share(text: str) -> float:
    share = _number(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    if not 0 <= share <= 1:
        raise ValueError(f"{text!r} is not a share of positions: write 0.99 or 99%")
    return share


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{text!r} is not a number")
    return number


def _divergence(text: str) -> float:
    number = _number(text)
    if number < 0:
        raise ValueError(f"{text!r} is less than any KL divergence: write 0 or more")
    return number


def _by_group(parse: Callable[[str], float]) -> Callable[[str], tuple[str, float]]:
    """Return a function that parses `confident=1e-3` to (full name of the group, number), and `0.01` to ("", number)."""

    def pair(text: str) -> tuple[str, float]:
        name, equals, number = text.rpartition("=")
        try:
            return group_named(name.strip()) if equals else "", parse(number.strip())
        except UserError as error:
            raise ValueError(str(error)) from None

    return pair


_IS_TOO = "Fail if a figure of the output, by its name in --json, or the candidate's value in a metric of --metric or --eval is too"
min_and_max_options = with_options(
    click.option(
        "--min",
        "least",
        multiple=True,
        metavar="METRIC=NUMBER",
        help=f"{_IS_TOO} low. accuracy=90%: lower than 0.9. accuracy=-1%, with a sign: more than 0.01 below the reference's "
        "value. May be repeated.",
    ),
    click.option(
        "--max",
        "most",
        multiple=True,
        metavar="METRIC=NUMBER",
        help=f"{_IS_TOO} high. wer=10%: higher than 0.1. wer=+0.5%, with a sign: more than 0.005 above the reference's value. "
        "May be repeated.",
    ),
)
threshold_options = with_options(
    click.option(
        "--max-kl",
        multiple=True,
        metavar="[GROUP=]NATS",
        type=_by_group(_divergence),
        help="Fail if the mean KL divergence of the candidate's output distribution from the reference's is larger than this "
        "number, in nats per position. confident=1e-3 limits the mean over the positions where the reference gives a class a "
        "probability of 0.95 or more, and position:129-256=0.01 that over a group of positions. May be repeated.",
    ),
    click.option(
        "--min-sqnr",
        metavar="DB",
        type=_number,
        help="Fail if the signal-to-quantization-noise ratio (SQNR) of the model's main output is lower than this number, in dB.",
    ),
    click.option(
        "--min-top1",
        multiple=True,
        metavar="[GROUP=]SHARE",
        type=_by_group(_share),
        help="Fail if the candidate's likeliest token or class is the same as the reference's in less than this share of "
        "positions, such as 0.99 or 99%. With GROUP= as for --max-kl. May be repeated.",
    ),
    min_and_max_options,
)


def finite_status(report: DriftReport) -> int:
    """Return the exit status that a measurement has without any limit. If the output is not finite, say so on standard error."""
    if report.output.is_finite:
        return 0
    print_stderr(f"dtype-engine: {printable(report.output_name, 100)} is not finite: {report.output.nonfinite_text}")
    return NO


def all_limits(values: Mapping[str, Any], metrics: Sequence[str]) -> tuple[Limit, ...]:
    """Return the limits that all options set: `--min`, `--max` and options for a single figure, such as `--max-kl`. The arguments
    and errors are those of `min_and_max_limits`.
    """
    rows = sorted((row for row in FIGURES.values() if row.option), key=lambda row: row.option)
    single = (limit for row in rows for limit in _limits_of(row, values[row.option]))
    return *single, *min_and_max_limits(values, metrics)


def _limits_of(row: Figure, given: float | Sequence[tuple[str, float]] | None) -> list[Limit]:
    """Return the limits of an option for a single figure. given: its number or None, or pairs (group or "", number)."""
    pairs = (("", given),) if isinstance(given, float) else given or ()
    option = row.option.replace("_", "-")
    return [
        Limit(f"{option} {limit_name(group)}" if group else row.option, row.name, number, group=group)
        for group, number in pairs
    ]


def min_and_max_limits(values: Mapping[str, Any], metrics: Sequence[str]) -> tuple[Limit, ...]:
    """Return the limits that --min and --max set. values: of a command's parameters, by parameter name. metrics: the user's own
    metrics, as `Options.metrics` names them. Raises UserError for a limit that can't be parsed, or that names neither a figure nor
    a metric.
    """
    limits = [
        *(Limit.parse(text, "min") for text in values["least"]),
        *(Limit.parse(text, "max") for text in values["most"]),
    ]
    names = {metric.rpartition(":")[2] for metric in metrics}
    for limit in limits:
        if limit.name not in names.union(FIGURES) and not any(map(evaluation, metrics)):
            raise UserError(
                f"--{limit.option}: no figure, --metric or --eval has this name"
                + (f"; there is {', '.join(sorted(names))}" if names else "")
            )
    return tuple(limits)
