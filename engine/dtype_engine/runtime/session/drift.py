"""Measures the drift of a session's recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtype_engine.core import dtypes
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.input_args import data_options
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.core.throttle import Throttle
from dtype_engine.core.tree import draft_notice
from dtype_engine.recipe import Plan
from dtype_engine.results.drift import DriftReport
from dtype_engine.runtime.device import reset_peak
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.measure.draft_head import DraftMeter, asks_for_drafts, not_measured
from dtype_engine.runtime.measure.drift import DriftMeter, budget_for
from dtype_engine.runtime.measure.listener import MeasurementListener
from dtype_engine.runtime.measure.user_metrics import MetricMeter, load_metrics
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.model_behavior import ModelBehavior
from dtype_engine.runtime.scan.saved import Fingerprint
from dtype_engine.runtime.session import saved_drift
from dtype_engine.runtime.session.calibration import Calibration
from dtype_engine.runtime.session.component_inputs import inputs_of
from dtype_engine.runtime.session.given_logits import Given, measure_given
from dtype_engine.runtime.session.process_memory import memory_stats, reset_peak_rss
from dtype_engine.runtime.session.rounding_notices import rounding_notices


@dataclass
class DriftMeasurements:
    """Measures the drift of one model, always on the same inputs. Keeps module outputs and metrics for later measurements."""

    model: LiveModel
    options: Options
    behavior: ModelBehavior
    given: Given | None = None
    """The file that has the outputs of the reference or of the candidate, or None if the model runs as both."""
    meter: DriftMeter | None = None
    """Measures drift. None before the first measurement."""
    _metrics: MetricMeter | None = None
    _drafts: DraftMeter | None = None

    @property
    def kept_outputs(self) -> tuple[int, int] | None:
        """(bytes of module outputs kept for later measurements, the limit for them). None before the first measurement."""
        return None if self.meter is None else (self.meter.kept_bytes, self.meter.budget)

    def measure(
        self,
        need_inputs: Callable[[], Inputs],
        plan: Plan,
        settings: RunSettings,
        listener: MeasurementListener,
        save: Path | None,
        calibration: Calibration | None,
    ) -> DriftReport:
        """Do the work of `Session.drift`: measure the drift of the model, the changes of the user's metrics, and the values that
        casts lose.

        need_inputs: returns the inputs, or raises NoForward. plan: the dtypes to which the model is cast. save: as for
        `Session.drift`. calibration: what the roundings of the plan were fitted to, if it has any.
        """
        if self.given is not None:
            return self._measure_given(self.given, plan, settings, listener, save, calibration)
        metrics = self._metric_meter(need_inputs)  # what is wrong with a metric is said before the model runs
        if self.meter is None:
            budget = budget_for(self.model, self.options.reference_bytes)
            self.meter = DriftMeter(self.model, need_inputs(), budget=budget, behavior=self.behavior)
        meter = self.meter
        meter.settings = settings
        listener = dataclasses.replace(
            listener,
            precision=listener.precision or (lambda: self.options.precision),
            all_modules=listener.all_modules or (lambda: self.options.modules == "exact"),
        )
        reset_peak_rss()
        reset_peak(self.model.device)
        self.model.memory.bytes_read = 0
        if save is None:
            totals = meter.measure(listener)
        else:
            rounds = calibration is not None and any(map(dtypes.has_rounding, plan.dtypes.values()))
            fitted = calibration.inputs if calibration is not None and rounds else None
            rules = list(map(str, plan.recipe.rules))
            fingerprint = Fingerprint.of(self.model, meter.inputs, rules, settings, fitted)
            with saved_drift.saving(save, fingerprint, meter, listener) as (listener, begun):
                totals = meter.measure(listener, begun=begun)
        throttle, on_progress = Throttle(), listener.on_progress

        def on_weights(done: int, total: int) -> None:
            if self.model.memory.limited and throttle.due():
                on_progress("values that casts lose", done, total)

        memory = memory_stats(self.model, plan, self.kept_outputs, self.options.max_memory)
        report = meter.report(totals, plan.recipe, memory, self.model.known_losses(plan.dtypes))
        report = dataclasses.replace(report, notices=(*report.notices, *rounding_notices(self.model, calibration)))
        if listener.on_measured is not None:
            listener.on_measured(report)
        lost = self.model.lost_values(None, listener.cancelled, on_weights)
        changes = metrics.measure(settings, listener.on_progress, listener.cancelled) if metrics is not None else ()
        report = dataclasses.replace(report, lost=lost, metrics=changes)
        return self._with_drafts(report, totals.numbers, meter.inputs, plan, settings, listener)

    def _with_drafts(
        self,
        report: DriftReport,
        numbers: Sequence[int],
        inputs: Inputs,
        plan: Plan,
        settings: RunSettings,
        listener: MeasurementListener,
    ) -> DriftReport:
        """Return a report with the acceptance of the draft head over the sequences `numbers`, if the settings ask for it and the
        model has a head, or with a notice why it is not measured.
        """
        if not asks_for_drafts(self.model, settings):
            return report
        self._drafts = self._drafts or DraftMeter(self.model, self.behavior)
        batches = {number: inputs.batches[number] for number in numbers}
        try:
            draft = self._drafts.measure(batches, plan.dtypes, settings, listener.on_progress, listener.cancelled)
        except (UserError, NoForward) as error:
            return dataclasses.replace(report, notices=(*report.notices, not_measured(str(error))))
        not_run = draft_notice(self.model.tree)
        notices = tuple(notice for notice in report.notices if notice not in not_run)
        return dataclasses.replace(report, draft=draft, notices=notices)

    def _measure_given(
        self,
        given: Given,
        plan: Plan,
        settings: RunSettings,
        listener: MeasurementListener,
        save: Path | None,
        calibration: Calibration | None,
    ) -> DriftReport:
        if save is not None:
            raise UserError("--save: a measurement against outputs in a file is not saved; leave --save out")
        listener = dataclasses.replace(listener, precision=listener.precision or (lambda: self.options.precision))
        report = measure_given(self.model, given, self.options, plan, settings, self.behavior, listener)
        return dataclasses.replace(report, notices=(*report.notices, *rounding_notices(self.model, calibration)))

    def _metric_meter(self, need_inputs: Callable[[], Inputs]) -> MetricMeter | None:
        if self._metrics is None and self.options.metrics:
            loaded, data = load_metrics(self.options.metrics, self.options.limits), need_inputs()
            if self.options.data:
                data = inputs_of(self.model, data_options(self.options))
            self._metrics = MetricMeter(self.model, loaded, data, self.behavior)
        return self._metrics
