"""Runs an evaluation in the process that calls it, which opens the model or export once and keeps it open."""

from __future__ import annotations

import os
import platform
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtype_engine.checkpoint import unchanged
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import RunSettings
from dtype_engine.evaluation import specs
from dtype_engine.recipe import Recipe
from dtype_engine.reports.versions import versions
from dtype_engine.results.drift import DriftReport

if TYPE_CHECKING:
    from dtype_engine.runtime.measure.attribution import Attribution, PartDrift
    from dtype_engine.runtime.scan.exact import MeasuredWeight
    from dtype_engine.runtime.scan.sequence_scans import ScannedSequence
    from dtype_engine.runtime.session.session import Session
    from dtype_engine.runtime.verify.verify import OpenExport

_lock = threading.Lock()  # a cluster's worker may have several threads, but a process has only one live model


@dataclass
class _ThisProcess:
    """The model or export, and the latest search for causes, that this process keeps for further tasks."""

    opened: tuple[specs.Opened, Session] | tuple[specs.Exported, OpenExport] | None = None
    """The open model or export with what it was opened for. There is only one, because memory may not have room for two."""
    attribution: tuple[Session, Recipe, RunSettings, Attribution] | None = None
    """The latest search for causes, with its session, recipe and settings. It holds outputs, so any other task drops it."""
    cancelled: IsCancelled = never


_process = _ThisProcess()


def cancel_by(cancelled: IsCancelled) -> None:
    """Set the function that this process's evaluations call to learn whether to stop."""
    _process.cancelled = cancelled


def evaluate(evaluation: specs.Evaluation) -> specs.Evaluated:
    """Run an evaluation and return its result. Raises Cancelled, and UserError, for example if the weights or inputs have
    changed.
    """
    with _lock:
        wanted, task = evaluation.opened, evaluation.task
        if _process.opened is None or _process.opened[0] != wanted:
            _process.opened = _process.attribution = None
            _process.opened = _open_model(wanted) if isinstance(wanted, specs.Opened) else _open_export(wanted)
        opened: Any = _process.opened[1]
        started = time.perf_counter()
        if isinstance(task, specs.CompareTensors):
            value: Any = tuple(opened.problems(task.indexes, _process.cancelled))
        else:
            opened.settings = wanted.options.settings
            value = perform(opened, task, _process.cancelled)
        seconds = time.perf_counter() - started
    return specs.Evaluated(value, platform.node(), os.getpid(), seconds, versions())


def perform(
    session: Session, task: specs.Task, cancelled: IsCancelled
) -> ScannedSequence | MeasuredWeight | DriftReport | PartDrift:
    """Return the result of a task in an open session, whose recipe may change. Raises UserError, Cancelled."""
    from dtype_engine.runtime.scan.exact import ExactScan

    if isinstance(task, specs.PartAlone):
        return _part_alone(session, task, cancelled)
    _process.attribution = None
    match task:
        case specs.ScanSequence(names, draws, index, rounded):
            scan = session.scan_task(names, draws, False, None)
            assert not isinstance(scan, ExactScan)
            return scan.measure(index, cancelled, rounded)
        case specs.ExactScore(names, weight, dtype):
            exact = session.scan_task(names, None, True, None)
            assert isinstance(exact, ExactScan)
            return exact.measure((weight, dtype), cancelled)
        case specs.RecipeDrift(recipe, settings):
            session.settings = settings
            session.use_recipe(recipe, cancelled=cancelled)
            return session.drift(cancelled=cancelled)


def _part_alone(session: Session, task: specs.PartAlone, cancelled: IsCancelled) -> PartDrift:
    from dtype_engine.runtime.measure.attribution import Attribution, Part

    kept, _process.attribution = _process.attribution, None  # stored again once the measurement has succeeded
    if kept is None or kept[0] is not session or kept[1:3] != (task.recipe, task.settings):
        kept = None  # frees its outputs before new ones are made
        session.use_recipe(task.recipe, cancelled=cancelled)
        assert session.inputs is not None
        kept = session, task.recipe, task.settings, Attribution(session.model, session.inputs, task.settings)
    with unchanged(session.model.identities):
        found = kept[3].measure(Part(task.name, task.modules), cancelled)
    _process.attribution = kept
    return found


def describe(session: Session) -> tuple[str, str]:
    """Return (hash of an open model's weights, hash of its inputs and of those that `Options.calibration` names). Raises UserError
    if the model can't be run.
    """
    from dtype_engine.runtime.scan.saved import Fingerprint

    if session.inputs is None:
        raise UserError(session.why_no_forward or "the model can't be run")
    named = session.calibration if session.options.calibration else None
    fitted = None if named is None else named.inputs
    found = Fingerprint.of(session.model, session.inputs, (), session.settings, fitted)
    return found.model, found.inputs + found.calibration


def _open_model(wanted: specs.Opened) -> tuple[specs.Opened, Session]:
    from dtype_engine.checkpoint.source import locate_by
    from dtype_engine.runtime.session.opening import open_session

    worker = _this_worker()
    try:
        source = locate_by(wanted.model, wanted.options)
        session = open_session(source, wanted.options)
    except UserError as error:
        raise UserError(f"{worker} can't open the model: {error}") from None
    for what, found in zip(("weights", "inputs"), describe(session), strict=True):
        if found != getattr(wanted, what):
            raise UserError(f"{worker} has other {what} for {wanted.model or 'demo'}: give every worker the same files")
    return wanted, session


def _open_export(wanted: specs.Exported) -> tuple[specs.Exported, OpenExport]:
    from dtype_engine.checkpoint.source import locate_by
    from dtype_engine.runtime.session.opening import use_threads
    from dtype_engine.runtime.verify.verify import fingerprint, open_export

    worker = _this_worker()
    try:
        source = locate_by(wanted.model, wanted.options)
        export = open_export(wanted.folder, source, wanted.options)
    except UserError as error:
        raise UserError(f"{worker} can't open the export: {error}") from None
    if fingerprint(export.contents, wanted.folder) != wanted.contents:
        raise UserError(f"{worker} has another export or another source: give every worker the same files")
    use_threads(wanted.options.threads)
    return wanted, export


def _this_worker() -> str:
    return f"process {os.getpid()} on {platform.node()}"
