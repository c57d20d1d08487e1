"""Evaluates plain data in whatever process it is called in: the model is opened once in a process and kept."""

from __future__ import annotations

import os
import platform
import threading
import time
from typing import TYPE_CHECKING

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import UserError
from dtype_engine.evaluation.specs import Evaluated, Evaluation, ExactScore, Opened, RecipeDrift, ScanSequence, Task
from dtype_engine.reports.versions import versions
from dtype_engine.results.drift import DriftReport

if TYPE_CHECKING:
    from dtype_engine.runtime.scan.exact import MeasuredWeight
    from dtype_engine.runtime.scan.scan import ScannedSequence
    from dtype_engine.runtime.session import Session

_lock = threading.Lock()  # a cluster's worker may have several threads, and there is one live model
_kept: list[tuple[Opened, Session]] = []
_cancelled: list[IsCancelled] = [never]


def cancel_by(cancelled: IsCancelled) -> None:
    """Stop the evaluations of this process where `cancelled()` is true."""
    _cancelled[:] = [cancelled]


def evaluate(evaluation: Evaluation) -> Evaluated:
    """Open the model, if it is not open, and evaluate.

    Raises UserError, also where the model or its inputs are not those that were asked about, and Cancelled.
    """
    with _lock:
        session = _opened(evaluation.opened)
        session.settings = evaluation.opened.options.settings
        started = time.perf_counter()
        value = perform(session, evaluation.task, _cancelled[0])
        seconds = time.perf_counter() - started
    return Evaluated(evaluation.opened, value, platform.node(), os.getpid(), seconds, versions())


def perform(session: Session, task: Task, cancelled: IsCancelled) -> ScannedSequence | MeasuredWeight | DriftReport:
    """Evaluate a task in an open session. Its recipe in force may be another afterwards. Raises UserError, Cancelled."""
    from dtype_engine.recipe import Recipe, Rule
    from dtype_engine.runtime.scan.exact import ExactScan

    match task:
        case ScanSequence(names, draws, index):
            scan = session.scan_task(names, draws, False, None)
            assert not isinstance(scan, ExactScan)
            return scan.measure(index, cancelled=cancelled)
        case ExactScore(names, weight, dtype):
            exact = session.scan_task(names, None, True, None)
            assert isinstance(exact, ExactScan)
            return exact.measure((weight, dtype), cancelled)
        case RecipeDrift(rules, settings):
            session.settings = settings
            session.use_recipe(Recipe.of(map(Rule.parse, rules)), cancelled=cancelled)
            return session.drift(cancelled=cancelled)


def describe(session: Session) -> tuple[str, str]:
    """The fingerprints of an open model's weights and inputs."""
    from dtype_engine.runtime.scan.saved import Fingerprint

    if session.inputs is None:
        raise UserError(session.no_forward or "the model can't be run")
    found = Fingerprint.of(session.model, session.inputs, (), session.settings)
    return found.model, found.inputs


def _opened(wanted: Opened) -> Session:
    if not _kept or _kept[0][0] != wanted:
        _kept.clear()  # first: two models may not fit
        from dtype_engine.checkpoint.source import locate
        from dtype_engine.runtime.opening import open_session

        here = f"process {os.getpid()} on {platform.node()}"
        try:
            source = locate(wanted.model, wanted.options.trust_pickle, wanted.options.download)
            session = open_session(source, wanted.options)
        except UserError as error:
            raise UserError(f"{here} can't open the model: {error}") from None
        for what, found, expected in zip(("weights", "inputs"), describe(session), _prints(wanted), strict=True):
            if found != expected:
                raise UserError(
                    f"{here} has other {what} for {wanted.model or 'demo'}: give every worker the same files"
                )
        _kept.append((wanted, session))
    return _kept[0][1]


def _prints(opened: Opened) -> tuple[str, str]:
    return opened.weights, opened.inputs
