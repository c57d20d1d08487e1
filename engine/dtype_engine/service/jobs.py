"""The table of jobs: what the app can ask about the current recipe, and the steps that complete a measurement.

A job is a row of `JOBS`. Its parameters (`Ask`) and its result (`events.JobDone`) cross between the processes as the types in
the annotations of its function `run`. Commands that change the session are classes in `commands.py`.

Annotations name classes of `dtype_engine.results` in full, as in `events.py`, which says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

import dtype_engine
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import CancelToken
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.core.text import Name, printable
from dtype_engine.core.throttle import Throttle
from dtype_engine.core.units import plural
from dtype_engine.recipe import Recipe
from dtype_engine.service.commands import IDLE_RANK, Command, Traits
from dtype_engine.service.value_checks import LARGEST_EXPONENT, MOST_NOTICES, check_length, check_rules

if TYPE_CHECKING:
    import dtype_engine.results.attribution
    import dtype_engine.results.check
    import dtype_engine.results.drift
    import dtype_engine.results.execution
    import dtype_engine.results.runs
    import dtype_engine.results.serving_memory
    import dtype_engine.results.token_choices
    import dtype_engine.results.weights
    from dtype_engine.runtime.session.session import Session
    from dtype_engine.service.open_model import OpenModel
    from dtype_engine.service.worker_processes import OnProgress, WorkerProcesses

_MOST_FINDINGS = 2_000
"""Maximum number of findings of a check that are sent to the app, which shows only the first ones of each kind."""
Parameters = TypeVar("Parameters")
Partial = TypeVar("Partial")
Result = TypeVar("Result")


class Work(msgspec.Struct, Generic[Partial], frozen=True):
    """The model and callbacks that a job gets. `Partial` is the type of its results before it ends, None if there are none."""

    model: OpenModel
    processes: WorkerProcesses
    recipe: Recipe
    token: CancelToken
    report: dtype_engine.results.drift.DriftReport | None
    """The last measurement, which is of the current recipe. None if the model can't be run."""
    last: object
    """The last result of this job if it does not depend on the recipe, otherwise None."""
    on_progress: OnProgress
    on_partial: Callable[[Partial], None]
    """Called with the result so far."""

    @property
    def session(self) -> Session:
        assert self.model.session is not None  # the queue refuses jobs that need a model if there is none
        return self.model.session

    def cast_session(self) -> Session:
        """Cast the model to the current recipe, and return the session."""
        self.session.use_recipe(self.recipe, cancelled=self.token)
        return self.session

    def progress(self, what: str) -> Callable[[int, int], None]:
        """Return a progress callback `(done, total)` for the step `what`."""
        return lambda done, total: self.on_progress(what, done, total)


class Job(Traits, Generic[Parameters, Partial, Result], frozen=True, kw_only=True):
    """A question that the app can ask, or a step that completes a measurement."""

    run: Callable[[Work[Partial], Parameters], Result | None]
    """The function that runs the job. It returns None if there is nothing to report."""
    check: Callable[[Result], None] = ignore
    """Checks a result from another process. It raises ValueError for a wrong result, and UserError for a rule that does not
    parse.
    """
    too_many: str = ""
    """Words for the user that follow the number of waiting jobs if there are too many. Only used if `once` is False."""
    of_recipe: bool = True
    """Whether the result depends on the recipe."""

    def ask(self, parameters: Parameters) -> Ask:
        return Ask(self.name, parameters)


class Ask(Command, frozen=True):
    """Run a job and emit its result as `JobDone`."""

    job: str
    """The name of a row of `JOBS`."""
    parameters: object = None

    @property
    def traits(self) -> Job[Any, Any, Any]:  # type: ignore[override]
        return JOBS[self.job]


# -- the current recipe ---------------------------------------------------------------------------------------------------


def _trace_casts(work: Work[None], _: None) -> tuple[dtype_engine.results.drift.ImplicitCastStats, ...]:
    return work.cast_session().flow(work.token)


def _attribute_drift(
    work: Work[dtype_engine.results.attribution.PartialAttribution], _: None
) -> dtype_engine.results.attribution.AttributionReport:
    from dtype_engine.service.worker_processes import shared_progress, throttled

    throttle = Throttle()

    def on_causes(found: dtype_engine.results.attribution.PartialAttribution) -> None:
        if throttle.due():
            work.on_partial(found)

    session = work.cast_session()
    with work.processes.over(session, session.plan.planned_bytes) as over:
        if over is None:
            on_step = partial(throttled(work.on_progress), "running each module as cast by itself")
            return session.causes(on_step, work.token, on_causes)
        from dtype_engine.evaluation.work import causes

        work.on_progress(f"causes: {plural(over.pool.workers, 'worker')} and the reference", 0, 1)
        return causes(session, over, shared_progress(work.on_progress, "causes", over), work.token, on_causes)


class GenerateText(msgspec.Struct, array_like=True, frozen=True):
    """The parameters of the jobs `generate` and `tokens`."""

    tokens: int
    """The number of tokens to generate."""
    prompt: str = ""
    """The text to continue, or "" to continue the model's inputs."""


def _generate(
    work: Work[dtype_engine.results.runs.Generation], wanted: GenerateText
) -> tuple[dtype_engine.results.runs.Generation, ...]:
    throttle, shown = Throttle(), Throttle()

    def on_tokens(variant: str, done: int, most: int) -> None:
        if throttle.due():
            work.on_progress(f"generating: {variant}", done, most)

    def on_text(read: Callable[[], dtype_engine.results.runs.Generation]) -> None:
        if shown.due():
            work.on_partial(read())

    return work.cast_session().generate(wanted.tokens, on_tokens, work.token, wanted.prompt or None, on_text)


def _compare_tokens(
    work: Work[dtype_engine.results.runs.Generation], wanted: GenerateText
) -> dtype_engine.results.token_choices.TokenReport:
    throttle, shown = Throttle(), Throttle()

    def on_step(what: str, done: int, total: int) -> None:
        if throttle.due():
            work.on_progress(what, done, total)

    def on_text(read: Callable[[], dtype_engine.results.runs.Generation]) -> None:
        if shown.due():
            work.on_partial(read())

    session = work.cast_session()
    return session.token_choices(wanted.tokens, on_step, work.token, wanted.prompt or None, on_text)


def _check_tokens(report: dtype_engine.results.token_choices.TokenReport) -> None:
    check_length(report.notices, MOST_NOTICES)
    for text in report.texts:
        own = text.reference
        others = own.pieces, text.candidate_ids, text.candidate_pieces, text.severities, text.kinds
        if any(len(each) != len(own.ids) for each in others):
            raise ValueError("a text whose tokens do not have one choice each")
        if not all(severity >= 0 for severity in text.severities):
            raise ValueError("a severity that no token has")


def _measure_speed(work: Work[None], _: None) -> dtype_engine.results.runs.SpeedReport:
    def on_passes(variant: str, done: int, total: int) -> None:
        work.on_progress(f"timing: {variant}", done, total)

    return work.cast_session().speed(on_passes, work.token)


def _check_speed(report: dtype_engine.results.runs.SpeedReport) -> None:
    check_length(report.rows)
    check_length(report.notices, MOST_NOTICES)


class PassSizes(msgspec.Struct, array_like=True, frozen=True):
    """The parameters of the job `activations`: the sizes of the passes whose memory is estimated."""

    contexts: tuple[int, ...]
    """The lengths of the sequences, in tokens."""
    batch: int
    """The number of sequences in each pass."""


def _compare_executions(work: Work[None], _: None) -> dtype_engine.results.execution.ExecutionReport:
    return work.cast_session().executions((), work.progress("comparing executions"), work.token)


def _check_executions(report: dtype_engine.results.execution.ExecutionReport) -> None:
    check_length(report.rows)


def _estimate_activations(
    work: Work[None], sizes: PassSizes
) -> tuple[dtype_engine.results.serving_memory.ActivationMemory, ...]:
    work.on_progress("following passes", 0, 0)
    return work.session.estimated_activations(sizes.contexts, sizes.batch, work.token)


def _check_activations(peaks: tuple[dtype_engine.results.serving_memory.ActivationMemory, ...]) -> None:
    check_length(peaks)
    if not peaks or min(min(peak.nbytes, peak.context - 1, peak.batch - 1) for peak in peaks) < 0:
        raise ValueError("no pass takes such memory")


# -- the model's files -----------------------------------------------------------------------------------------------------


def _check_files(work: Work[None], _: None) -> dtype_engine.results.check.CheckReport:
    from dtype_engine.checkpoint.check import check
    from dtype_engine.runtime.building.describe import with_architecture

    model = work.model
    if model.checkpoint is None:
        raise UserError(f"{model.source.title} {model.source.no_headers}: a check reads the files of a checkpoint")

    def on_progress(what: str, done: int, total: int) -> None:
        if work.token():
            raise Cancelled
        work.on_progress(f"checking {what}", done, total)

    found = check(model.checkpoint, model.source.title, progress=on_progress)
    found = with_architecture(found, model.source, model.options, model.checkpoint)
    if (more := len(found.findings) - _MOST_FINDINGS) > 0:
        unchecked = (*found.unchecked, f"{more:,} further findings are left out here: dtype-engine check has them")
        found = replace(found, findings=found.findings[:_MOST_FINDINGS], unchecked=unchecked)
    return found


def _check_findings(report: dtype_engine.results.check.CheckReport) -> None:
    from dtype_engine.results.check import KINDS

    check_length(report.unchecked, MOST_NOTICES)
    if unknown := {finding.kind for finding in report.findings} - KINDS.keys():
        raise ValueError(f"there is no finding of the kind {min(unknown)}")


class InspectTensor(msgspec.Struct, array_like=True, frozen=True):
    """The parameters of the job `values`."""

    tensor: Name
    targets: tuple[str, ...]
    """The dtypes to which the tensor is cast, to report the error of each cast."""
    with_gains: bool = False
    """Whether to run the calibration inputs, and report what a rounding gains in each of these dtypes that takes one."""


def _inspect(work: Work[None], wanted: InspectTensor) -> dtype_engine.results.weights.WeightStats:
    from dtype_engine.checkpoint import unchanged
    from dtype_engine.runtime.measure.weight_errors import inspect_weight

    model, name, targets = work.model, wanted.tensor, wanted.targets
    work.on_progress(f"reading {printable(name, 60)}", 0, 1)
    opened = model.session.model if model.session is not None else model.checkpoint
    assert opened is not None
    with unchanged(opened.identities):
        stats = inspect_weight(opened, name, targets, work.token)
    if not wanted.with_gains:
        return stats
    if model.session is None or (tensor := model.session.tree.canonical(name)) is None:
        raise UserError(f"a rounding of {printable(name, 200)} needs its layer's inputs, so the model has to be loaded")
    fitting = work.progress(f"rounding {printable(name, 60)}")
    return replace(stats, gains=model.session.rounding_gains({tensor.name: targets}, fitting, work.token))


def _check_values(stats: dtype_engine.results.weights.WeightStats) -> None:
    check_length(stats.errors)
    check_length(stats.gains)
    if any(abs(power) > LARGEST_EXPONENT or count < 1 for power, count in stats.exponents.counts):
        raise ValueError("a power of two that no value has")
    if any(error.elements < 1 for error in stats.errors):
        raise ValueError("an error of no elements")


# -- steps that complete a measurement -------------------------------------------------------------------------------------


def _find_nonfinite(work: Work[None], _: None) -> dtype_engine.results.attribution.NonFiniteDiagnosis | None:
    assert work.report is not None
    return work.session.nonfinite(work.report, work.progress("trying what makes the output finite"), work.token)


def _find_loss_remedy(work: Work[None], _: None) -> dtype_engine.results.attribution.LossRemedy | None:
    return work.session.loss_remedy(work.report, work.progress("trying what keeps the values"), work.token)


def _measure_floor(work: Work[None], _: None) -> dtype_engine.results.attribution.NoiseFloor | None:
    floor = work.session.floor(work.progress("measuring the noise floor"), work.token)
    return None if floor is work.last else floor


def _measure_kernels(work: Work[None], _: None) -> dtype_engine.results.attribution.NoiseFloor | None:
    return work.cast_session().candidate_floor(work.progress("measuring other kernels"), work.token)


def _compare_weights(work: Work[None], _: None) -> tuple[dtype_engine.results.drift.ModuleDrift, ...]:
    return work.cast_session().weight_differences(work.token)


FLOW = Job("flow", run=_trace_casts)
"""Record the implicit casts of one pass: inside operations that compute in another dtype than a tensor that they receive."""
CAUSES = Job("causes", run=_attribute_drift)
"""Find the modules that cause the drift of the output, by casting one module at a time."""
GENERATE = Job("generate", run=_generate)
"""Generate text with the float32 reference, and with the model cast to the current recipe."""
TOKENS = Job("tokens", run=_compare_tokens, check=_check_tokens)
"""Let the reference write texts, and ask at each token whether the candidate would choose the same one."""
SPEED = Job("speed", run=_measure_speed, check=_check_speed)
"""Time forward passes in the dtypes of the reference, of the checkpoint, and of the current recipe."""
EXECUTIONS = Job("executions", run=_compare_executions, check=_check_executions)
"""Compare the outputs of the candidate under other attention kernels, batches and decoding."""
ACTIVATIONS = Job("activations", run=_estimate_activations, check=_check_activations)
"""Estimate the peak memory of activations in forward passes."""
CHECK = Job("check", run=_check_files, check=_check_findings, needs_model=False)
"""Check the files of the model for problems, such as missing or damaged tensors."""
VALUES = Job(
    "values",
    once=False,
    needs_model=False,
    run=_inspect,
    check=_check_values,
    too_many="tensors already wait for their values to be read",
)
"""Report how often each exponent occurs in one tensor, and the error of casting it to other dtypes."""
NONFINITE = Job("nonfinite", run=_find_nonfinite, check=lambda found: check_rules(found.remedy), rank=2, follows=True)
"""Find out why the output in the last measurement is not finite, and which rules make it finite."""
LOSS_REMEDY = Job("losses", run=_find_loss_remedy, check=lambda found: check_rules(found.rules), rank=2, follows=True)
"""Find rules that prevent the current casts from making weight values infinite or zero."""
FLOOR = Job("floor", run=_measure_floor, rank=IDLE_RANK, follows=True, of_recipe=False)
"""Measure the noise floor: the drift of the reference from itself in another order of arithmetic. Once for each set of inputs."""
KERNELS = Job("kernels", run=_measure_kernels, rank=IDLE_RANK, follows=True)
"""Measure by how much other kernels change the output of a candidate that computes in 16 bits."""
WEIGHTS = Job("weights", run=_compare_weights, rank=IDLE_RANK, follows=True)
"""Compare each weight, as the current recipe casts it, with the same weight of the checkpoint that serves as the reference."""
JOBS: dict[str, Job[Any, Any, Any]] = {
    job.name: job
    for job in (
        FLOW,
        CAUSES,
        GENERATE,
        TOKENS,
        SPEED,
        EXECUTIONS,
        ACTIVATIONS,
        CHECK,
        VALUES,
        NONFINITE,
        LOSS_REMEDY,
        FLOOR,
        KERNELS,
        WEIGHTS,
    )
}
"""All jobs by name."""
