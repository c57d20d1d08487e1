"""Limits on the drift, as options of `dtype-engine` and `dtype-tui`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from dtype_engine.results.thresholds import Thresholds

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


_OPTIONS = (
    click.option(
        "--max-kl",
        metavar="NATS",
        callback=_number,
        help="Fail if the mean KL divergence is larger than this number of nats per position.",
    ),
    click.option(
        "--min-sqnr", metavar="DB", callback=_number, help="Fail if the main output's SQNR is below this number of dB."
    ),
    click.option(
        "--min-top1",
        metavar="SHARE",
        callback=_share,
        help="Fail if the top-1 agreement is lower than this share, such as 0.99 or 99%.",
    ),
)


def threshold_options(command: Function) -> Function:
    """A decorator that adds the options for limits on the drift, such as --max-kl, to a command's function."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def thresholds_from(values: Mapping[str, float | None]) -> Thresholds:
    """Return the limits on the drift from the values of a command's parameters, keyed by parameter name."""
    return Thresholds(values["max_kl"], values["min_sqnr"], values["min_top1"])
