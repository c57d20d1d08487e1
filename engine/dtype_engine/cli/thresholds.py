"""Limits on the drift, as options of `dtype-engine` and `dtype-tui`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from dtype_engine.core.errors import UserError
from dtype_engine.core.options import LM_EVAL
from dtype_engine.results.figures import FIGURES
from dtype_engine.results.thresholds import Limit

Function = TypeVar("Function", bound=Callable[..., Any])


def _share(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    share = _number(context, parameter, text.strip().removesuffix("%") if text is not None else None)
    if share is None or text is None:
        return None
    share = share / 100 if text.strip().endswith("%") else share
    if not 0 <= share <= 1:
        raise click.BadParameter(f"{text!r} is not a share of positions: write 0.99 or 99%")
    return share


def _number(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise click.BadParameter(f"{text!r} is not a number")
    return number


def _divergence(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    number = _number(context, parameter, text)
    if number is not None and number < 0:
        raise click.BadParameter(f"{text!r} is less than any KL divergence: write 0 or more")
    return number


_OPTIONS = (
    click.option(
        "--max-kl",
        metavar="NATS",
        callback=_divergence,
        help="Fail if the mean KL divergence of the candidate's output distribution from the reference's is larger than this "
        "number, in nats per position.",
    ),
    click.option(
        "--min-sqnr",
        metavar="DB",
        callback=_number,
        help="Fail if the signal-to-quantization-noise ratio (SQNR) of the model's main output is lower than this number, in dB.",
    ),
    click.option(
        "--min-top1",
        metavar="SHARE",
        callback=_share,
        help="Fail if the candidate's likeliest token or class is the same as the reference's in less than this share of "
        "positions, such as 0.99 or 99%.",
    ),
)


_IS_TOO = "Fail if a figure of the output, by its name in --json, or the candidate's value in a metric of --metric or --eval is too"
_MIN_AND_MAX = [
    click.option(flag, name, multiple=True, metavar="METRIC=NUMBER", help=f"{_IS_TOO} {words} May be repeated.")
    for flag, name, words in (
        (
            "--min",
            "least",
            "low. accuracy=90%: lower than 0.9. accuracy=-1%, with a sign: more than 0.01 below the reference's value.",
        ),
        (
            "--max",
            "most",
            "high. wer=10%: higher than 0.1. wer=+0.5%, with a sign: more than 0.005 above the reference's value.",
        ),
    )
]


def threshold_options(command: Function) -> Function:
    """A decorator that adds the options for limits on the drift, such as --max-kl, to a command's function."""
    for option in reversed((*_OPTIONS, *_MIN_AND_MAX)):
        command = option(command)
    return command


def min_and_max_options(command: Function) -> Function:
    """A decorator that adds the options --min and --max to a command's function."""
    for option in reversed(_MIN_AND_MAX):
        command = option(command)
    return command


def all_limits(values: Mapping[str, Any], metrics: Sequence[str]) -> tuple[Limit, ...]:
    """Return the limits that all options set. The arguments and errors are those of `min_and_max_limits`."""
    rows = sorted((row for row in FIGURES.values() if row.option), key=lambda row: row.option)
    single = (Limit(row.option, row.name, values[row.option]) for row in rows if values[row.option] is not None)
    return *single, *min_and_max_limits(values, metrics)


def min_and_max_limits(values: Mapping[str, Any], metrics: Sequence[str]) -> tuple[Limit, ...]:
    """Return the limits that --min and --max set. values: those of a command's parameters, keyed by parameter name. metrics: the
    user's own metrics, as `Options.metrics` names them. Raises UserError for a limit that is not understood, and for a name that
    neither a figure nor a metric has.
    """
    limits = [
        *(Limit.parse(text, "min") for text in values["least"]),
        *(Limit.parse(text, "max") for text in values["most"]),
    ]
    names = {metric.rpartition(":")[2] for metric in metrics}
    for limit in limits:
        if limit.name not in names.union(FIGURES) and not any(metric.startswith(LM_EVAL) for metric in metrics):
            raise UserError(
                f"--{limit.option}: no figure, --metric or --eval has this name"
                + (f"; there is {', '.join(sorted(names))}" if names else "")
            )
    return tuple(limits)
