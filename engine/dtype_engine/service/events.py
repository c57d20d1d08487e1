"""All events that the worker emits.

Events come in order, from the worker's threads. An event about a recipe contains that recipe, so that a pane can ignore events
about any recipe but the current one.

Annotations name classes of `dtype_engine.results` in full, but this module does not import them: creating data classes takes
milliseconds, and the first paint needs none of them. `messages.py` imports them, because msgspec looks them up there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import dtype_engine
from dtype_engine.core.options import RunSettings
from dtype_engine.core.text import Name
from dtype_engine.core.tree import Tree
from dtype_engine.recipe import Recipe
from dtype_engine.service.jobs import Ask, Job, Parameters, Partial, Result
from dtype_engine.service.message import Message
from dtype_engine.service.save_requests import ExportPlan

if TYPE_CHECKING:
    import dtype_engine.results.drift
    import dtype_engine.results.inputs
    import dtype_engine.results.losses
    import dtype_engine.results.memory
    import dtype_engine.results.scan


class Event(Message, frozen=True):
    """The base class of all events, which tell the app what has happened."""


class LoadingProgress(Event, frozen=True):
    """Reports progress while the model is being opened. Most of the time is spent on importing Python modules: `done` of about
    `total` are imported. A total of 0 means that the number is unknown.
    """

    step: str
    """The current step in a few words."""
    done: int = 0
    total: int = 0


class HeadersRead(Event, frozen=True):
    """Reports that all headers of the checkpoint are read. `tree` replaces the tree that the app built from only some of the
    headers.
    """

    tree: Tree
    notices: tuple[str, ...] = ()
    provenance: tuple[str, ...] = ()
    """Lines that say how the checkpoint was quantized, such as "not quantized: lm_head". Empty if its files don't say."""


class ModelReady(Event, frozen=True):
    """Reports that the model is loaded."""

    tree: Tree
    """The model's tree, with module classes, tied weights and buffers."""
    class_name: str
    device: str
    seconds: float
    inputs: str
    notices: tuple[str, ...]
    no_forward: str | None = None
    """Why the model can't be run, or None if it can."""
    no_text: str | None = None
    """Why the model can't generate text, or None if it can."""
    memory_bytes: int | None = None
    """How many bytes of memory the model's device has or, on the CPU, how many of them models may use. None if this is unknown."""
    provenance: tuple[str, ...] = ()
    """Lines that say how the checkpoint was quantized, such as "not quantized: lm_head". Empty if its files don't say."""
    reference: str = "float32"
    """The name of the reference, from which drift is measured: "float32", for example, or "as stored (bfloat16)", or the path or
    name of another checkpoint.
    """


class InputsReady(Event, frozen=True):
    """Reports the inputs on which the model is run from now on. Earlier measurements used other inputs."""

    summary: dtype_engine.results.inputs.InputsSummary


class InputsRefused(Event, frozen=True):
    """Reports that the inputs that the user requested do not fit the model or can't be read. The previous inputs stay in use."""

    message: str


class OpenFailed(Event, frozen=True):
    """Reports that the model could not be opened. At most the tree from its file headers is available."""

    message: str
    classes_follow: bool = False
    """Whether a `HeadersRead` event with the module classes will follow."""
    memory_bytes: int | None = None
    """How many bytes of memory models may use on the engine's machine, or None if this is unknown."""


class CastingProgress(Event, frozen=True):
    """Reports that `done` of `total` tensors are cast."""

    recipe: Recipe
    done: int
    total: int


class CastDone(Event, frozen=True):
    """Reports that the live model is cast to the recipe. If the model could not be loaded, only the values that the casts would
    make infinite or zero are counted.
    """

    recipe: Recipe
    lost: tuple[dtype_engine.results.losses.ValueLoss, ...] | None
    """For each tensor in which casts make values infinite, make them zero or clip them: how many values. None if they were not
    counted.
    """
    reason: str = ""
    """Why `lost` is None, that is, why the values were not counted; "" if they were."""


class MeasuringProgress(Event, frozen=True):
    """Reports how far a measurement is: it has processed `done` of `total` input elements, such as tokens. An element counts once
    in each pass over the inputs.
    """

    recipe: Recipe
    run: str
    """The model that is running: "reference" (in float32) or "candidate" (cast to the recipe). At the end, for a model that runs
    from the disk, it is "values that casts lose", and `done` and `total` are numbers of weights.
    """
    done: int
    total: int


class WorkingProgress(Event, frozen=True):
    """Reports that a long command has done `done` of `total` steps. Measurements and saves report progress by other events."""

    recipe: Recipe
    what: str
    """The current step in a few words."""
    done: int
    total: int


class ModulesMeasured(Event, frozen=True):
    """Reports the drift of some modules over the inputs that have been run so far. Each later event replaces the metrics of the
    modules that it contains.
    """

    recipe: Recipe
    modules: tuple[dtype_engine.results.drift.ModuleDrift, ...]


class OutputMeasured(Event, frozen=True):
    """Reports the drift of the main output over the sequences that a running measurement has completed. `settings` are those of the
    measurement.
    """

    recipe: Recipe
    settings: RunSettings
    drift: dtype_engine.results.drift.PartialDrift


class Measured(Event, frozen=True):
    """Reports the result of a measurement that has run all inputs or reached the requested precision. `settings` are those of the
    measurement.
    """

    recipe: Recipe
    report: dtype_engine.results.drift.DriftReport
    settings: RunSettings = RunSettings()


class JobGrown(Event, frozen=True):
    """Reports the result that a job has so far, while it runs. The fields are those of `JobDone`."""

    recipe: Recipe | None
    ask: Ask
    result: object


class JobDone(Event, frozen=True):
    """Reports the result of a job (`jobs.JOBS`)."""

    recipe: Recipe | None
    """The recipe to which the result belongs, or None if the result does not depend on the recipe."""
    ask: Ask
    """The command that is answered."""
    result: object
    """The result, of the type that the job's function `run` returns."""


class ExportPlanned(Event, frozen=True):
    """Reports what an export of `recipe` would write. If the recipe can't be exported, `plan` is None and `reason` says why."""

    recipe: Recipe
    plan: ExportPlan | None
    reason: str = ""


class PathChecked(Event, frozen=True):
    """Reports whether a save can write to a path on the engine's machine. `taken`: whether a file or a non-empty folder exists
    there. `reason`: why nothing can be written there, or "" if something can.
    """

    path: str
    taken: bool
    reason: str = ""


class SavingProgress(Event, frozen=True):
    """Reports that a save has written `done` of `total` bytes. The app shows this even if the current recipe has changed."""

    recipe: Recipe
    what: str
    """The current step in a few words."""
    done: int
    total: int


class Saved(Event, frozen=True):
    """Reports that a save has ended, successfully or not. A save writes an export, a recipe or a report."""

    recipe: Recipe
    done: bool
    """Whether everything was written."""
    sentence: str
    """A sentence that says what was written to which path, or why nothing was written."""
    notices: tuple[str, ...] = ()


class Composed(Event, frozen=True):
    """Carries the text of a recipe file that the user saves. The app writes the file itself, because it runs on another machine
    than the engine.
    """

    recipe: Recipe
    text: str
    notices: tuple[str, ...] = ()


class ScanUpdated(Event, frozen=True):
    """Reports a scan's current estimates of the drift if only one weight is cast, for each weight and dtype. They do not depend on
    the current recipe. finished: whether all of the scan's inputs were run.
    """

    report: dtype_engine.results.scan.ScanReport
    finished: bool


class RecipeMeasured(Event, frozen=True):
    """Reports the drift of one recipe, which need not be the current one: the answer to `MeasureRecipes`. `settings` are those of
    the measurement.
    """

    report: dtype_engine.results.drift.DriftReport
    settings: RunSettings = RunSettings()


class Noticed(Event, frozen=True):
    """Carries a note to the user about the running command."""

    message: str


class Failed(Event, frozen=True):
    """Reports that the measurement of `recipe` ended with an error. The session continues."""

    recipe: Recipe
    message: str
    module: Name | None = None
    """The module of the model in which the error arose; None if it is unknown."""


class Refused(Event, frozen=True):
    """Reports that a command can't be run, or that it failed. Earlier metrics stay valid."""

    job: str
    """The name of the refused or failed command, or of the step of a measurement that failed."""
    message: str


class Stopped(Event, frozen=True):
    """Reports that the user stopped a command. It is not emitted if a newer command supersedes an older one."""

    recipe: Recipe
    job: str | None
    """The name of the command that was running, or None if none was."""
    dropped: tuple[str, ...] = ()
    """The names of the waiting commands that were dropped."""


class Jobs(Event, frozen=True):
    """Reports the names of the running command ("" if none is running) and of the waiting commands, in order. It is emitted on
    every change.
    """

    running: str
    waiting: tuple[str, ...]


class Memory(Event, frozen=True):
    """Reports the memory in use, about four times a second while a command runs, and once when the command ends."""

    recipe: Recipe
    stats: dtype_engine.results.memory.MemoryStats


class Idle(Event, frozen=True):
    """Reports that no command is running or waiting."""


class EngineEnded(Event, frozen=True):
    """Reports that the engine's process has ended and its work is lost; `message` says why. `Engine.restart` starts another."""

    message: str


class EngineLost(Event, frozen=True):
    """Reports that the connection to the engine is cut. The engine continues its work, and the app tries to reconnect."""

    message: str


class EngineBack(Event, frozen=True):
    """Reports that the engine is connected again. It is followed by the events that the engine emitted while it was
    disconnected.
    """


REPLACEABLE = (
    LoadingProgress,
    CastingProgress,
    MeasuringProgress,
    WorkingProgress,
    JobGrown,
    SavingProgress,
    OutputMeasured,
    Memory,
    Jobs,
    ScanUpdated,
)
"""Types of events that report a current state. Of each type, only the newest event matters."""


def is_opened(event: Event) -> bool:
    """Return whether the event ends the opening of a model, successfully or not. The caller then turns garbage collection on again,
    which is off while a model is opened.
    """
    return isinstance(event, ModelReady | Idle | EngineEnded | EngineLost) or (
        isinstance(event, OpenFailed) and not event.classes_follow
    )


def result_of(event: Event, job: Job[Parameters, Partial, Result]) -> Result | None:
    """Return the result of this job if the event reports one, otherwise None."""
    return cast("Result", event.result) if isinstance(event, JobDone) and event.ask.job == job.name else None


def partial_of(event: Event, job: Job[Parameters, Partial, Result]) -> Partial | None:
    """Return the result so far of this job if the event reports one, otherwise None."""
    return cast("Partial", event.result) if isinstance(event, JobGrown) and event.ask.job == job.name else None
