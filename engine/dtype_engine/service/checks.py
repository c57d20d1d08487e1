"""Checks the values in events that an engine in another process sends. Without these checks, a wrong value, such as an unknown
dtype or a tensor without elements, could make the app fail later.
"""

from __future__ import annotations

from collections.abc import Iterable

from dtype_engine.service import events
from dtype_engine.service.jobs import is_job
from dtype_engine.service.value_checks import (
    MOST_NOTICES,
    check_dtypes,
    check_length,
    check_losses,
    check_pictures,
    check_rules,
)


def check_event(event: object) -> None:
    """Check the values of an event that came from an engine, which may be another program on another machine.

    Raises ValueError if a value is one that no engine of this version sends, and UserError for a rule that does not parse.

    The recipe of an event is not checked, because the app only compares it with the current recipe.
    """
    match event:
        case events.HeadersRead() | events.ModelReady() | events.Saved() | events.Composed():
            check_length(event.notices, MOST_NOTICES)
        case events.InputsReady():
            check_length(event.summary.made_of)
        case events.CastDone():
            check_losses(event.lost or ())
        case events.Measured():
            check_length(event.report.notices, MOST_NOTICES)
            check_losses(event.report.lost or ())
            check_pictures(event.report.pictures)
        case events.RecipeMeasured():
            check_length(event.report.notices, MOST_NOTICES)
            check_losses(event.report.lost or ())
            check_pictures(event.report.pictures)
            check_rules(event.report.rules)
        case events.ExportPlanned() if event.plan is not None:
            check_losses(event.plan.lost or ())
        case events.ScanUpdated():
            if not event.report.dtypes:
                raise ValueError("a scan of no dtypes")
            check_dtypes((*event.report.dtypes, *{score.dtype for score in event.report.weights}))
        case events.JobDone():
            event.ask.traits.check(event.result)
        case events.Refused():
            _check_jobs((event.job,))
        case events.Stopped():
            _check_jobs((*event.dropped, *((event.job,) if event.job is not None else ())))
        case events.Jobs():
            _check_jobs((*event.waiting, *((event.running,) if event.running else ())))


def _check_jobs(names: Iterable[str]) -> None:
    for name in names:
        if not is_job(name):
            raise ValueError(f"there is no job {name}")
