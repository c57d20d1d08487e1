"""Checks the values in events of an engine in another process: a wrong one could make the app fail later."""

from __future__ import annotations

from collections.abc import Iterable

from dtype_engine.service import events
from dtype_engine.service.commands import OWN_NAMES
from dtype_engine.service.jobs import JOBS
from dtype_engine.service.value_checks import (
    MOST_NOTICES,
    check_dtypes,
    check_length,
    check_losses,
    check_pictures,
    check_rules,
)


def check_event(event: object) -> None:
    """Check the values of an event, which may come from another program. Its recipe is only compared by the app.

    Raises ValueError for a value that no engine of this version sends, and UserError for a rule that does not parse.
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
        if name not in JOBS and name not in OWN_NAMES:
            raise ValueError(f"there is no job {name}")
