"""All events that the worker emits.

Events come in order, from the worker's threads. An event about a recipe contains that recipe, so that a pane can ignore events
about any recipe but the current one.

Annotations name classes of `dtype_engine.results` in full, but this module does not import them: creating data classes takes
milliseconds, and the first paint needs none. `messages.py` imports them, because msgspec looks them up there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

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
    """What has happened. The base class of all events."""


class LoadingProgress(Event, frozen=True):
    """Progress while the model is being opened: `done` of about `total` Python modules are imported, which takes most of the time.
    A total of 0 means that the total is unknown.
    """

    step: str
    """The current step in a few words."""
    done: int = 0
    total: int = 0


class HeadersRead(Event, frozen=True):
    """All headers of the checkpoint are read. `tree` replaces the tree that the app built from only some headers."""

    tree: Tree
    notices: tuple[str, ...] = ()
    provenance: tuple[str, ...] = ()
    """Lines that say how the checkpoint was quantized, such as "not quantized: lm_head". Empty if its files don't say."""


class ModelReady(Event, frozen=True):
    """The model is loaded."""

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
    """The memory of the model's device or, on the CPU, the memory that models may use, in bytes. None if unknown."""
    provenance: tuple[str, ...] = ()
    """As in `HeadersRead`."""
    reference: str = "float32"
    """The reference of the drift: "float32", "as stored (bfloat16)", or the path or name of another checkpoint."""
    loader: Literal["transformers", "own"] = "own"
    """The program that loads an export of the model: "transformers", or "own" for this program alone."""


class InputsReady(Event, frozen=True):
    """The inputs on which the model is run from now on. Earlier measurements used other inputs."""

    summary: dtype_engine.results.inputs.InputsSummary


class InputsRefused(Event, frozen=True):
    """The inputs that the user requested do not fit the model or can't be read. The previous ones stay in use."""

    message: str


class OpenFailed(Event, frozen=True):
    """The model could not be opened. Only the tree from its files' headers may be available."""

    message: str
    classes_follow: bool = False
    """Whether a `HeadersRead` event with the module classes will follow."""
    memory_bytes: int | None = None
    """How many bytes models may use on the engine's machine, or None if this is unknown."""


class CastingProgress(Event, frozen=True):
    """`done` of `total` tensors are cast."""

    recipe: Recipe
    done: int
    total: int


class CastDone(Event, frozen=True):
    """The live model is cast to the recipe. If no model is loaded, the event only reports the values that the casts would lose."""

    recipe: Recipe
    lost: tuple[dtype_engine.results.losses.ValueLoss, ...] | None
    """For each tensor that loses values, how many values casts make infinite, make zero or clip. None if they were not counted."""
    reason: str = ""
    """Why `lost` is None, or "" if no reason is shown."""


class MeasuringProgress(Event, frozen=True):
    """A measurement has processed `done` of `total` input elements, such as tokens. Each element counts once for every pass."""

    recipe: Recipe
    run: str
    """The model that is running: "reference" or "candidate" (cast to the recipe). At the end, for a model that runs from the
    disk, "values that casts lose"; `done` and `total` are then numbers of weights.
    """
    done: int
    total: int


class WorkingProgress(Event, frozen=True):
    """A long command has done `done` of `total` steps. Measurements and saves report progress by other events."""

    recipe: Recipe
    what: str
    """The current step in a few words."""
    done: int
    total: int


class ModulesMeasured(Event, frozen=True):
    """The drift of some modules over the inputs so far. A later event replaces the drift of the modules that it contains."""

    recipe: Recipe
    modules: tuple[dtype_engine.results.drift.ModuleDrift, ...]


class OutputMeasured(Event, frozen=True):
    """The drift of the main output over the sequences that a running measurement, with these settings, has completed."""

    recipe: Recipe
    settings: RunSettings
    drift: dtype_engine.results.drift.PartialDrift


class Measured(Event, frozen=True):
    """A measurement, with these settings, has run all inputs or reached the requested precision."""

    recipe: Recipe
    report: dtype_engine.results.drift.DriftReport
    settings: RunSettings = RunSettings()


class JobGrown(Event, frozen=True):
    """The result that a job has so far. The fields are those of `JobDone`."""

    recipe: Recipe | None
    ask: Ask
    result: object


class JobDone(Event, frozen=True):
    """The result of a job (`jobs.JOBS`)."""

    recipe: Recipe | None
    """The recipe to which the result belongs, or None if the result does not depend on the recipe."""
    ask: Ask
    """The command to which this is the answer."""
    result: object
    """The result, of the type that the job's function `run` returns."""


class ExportPlanned(Event, frozen=True):
    """What an export of `recipe` would write. If it can't be exported, `plan` is None and `reason` says why."""

    recipe: Recipe
    plan: ExportPlan | None
    reason: str = ""


class PathChecked(Event, frozen=True):
    """Whether a save can write to a path on the engine's machine. `taken`: whether a file or a non-empty folder exists there.
    `reason`: why nothing can be written there, or "".
    """

    path: str
    taken: bool
    reason: str = ""


class SavingProgress(Event, frozen=True):
    """A save has written `done` of `total` bytes. The app shows this even if the current recipe has changed."""

    recipe: Recipe
    what: str
    """The current step in a few words."""
    done: int
    total: int


class Saved(Event, frozen=True):
    """A save of an export, a recipe or a report has ended, successfully or not."""

    recipe: Recipe
    done: bool
    """Whether everything was written."""
    sentence: str
    """What was written to which path, or why nothing was written."""
    notices: tuple[str, ...] = ()


class Composed(Event, frozen=True):
    """The text of a recipe file, which the app writes because it runs on another machine than the engine."""

    recipe: Recipe
    text: str
    notices: tuple[str, ...] = ()


class ScanUpdated(Event, frozen=True):
    """A scan's estimates so far, which do not depend on the current recipe. finished: whether the scan has run all its inputs."""

    report: dtype_engine.results.scan.ScanReport
    finished: bool


class RecipeMeasured(Event, frozen=True):
    """The drift of one recipe, which need not be the current one: the answer to `MeasureRecipes`."""

    report: dtype_engine.results.drift.DriftReport
    settings: RunSettings = RunSettings()


class Noticed(Event, frozen=True):
    """A note to the user about the running command."""

    message: str


class Failed(Event, frozen=True):
    """The measurement of `recipe` ended with an error. The session continues."""

    recipe: Recipe
    message: str
    module: Name | None = None
    """The module of the model in which the error arose; None if it is unknown."""


class Refused(Event, frozen=True):
    """A command can't be run, or failed. Earlier metrics stay valid."""

    job: str
    """The name of the command, or of the step of a measurement."""
    message: str


class Stopped(Event, frozen=True):
    """The user stopped a command. Not emitted if a newer command supersedes an older one."""

    recipe: Recipe
    job: str | None
    """The name of the command that was running, or None if none was."""
    dropped: tuple[str, ...] = ()
    """The names of the waiting commands that were dropped."""


class Jobs(Event, frozen=True):
    """The names of the running command ("" if none is running) and of the waiting ones, in order, on every change."""

    running: str
    waiting: tuple[str, ...]


class Memory(Event, frozen=True):
    """The memory in use, about four times a second while a command runs, and once when it ends."""

    recipe: Recipe
    stats: dtype_engine.results.memory.MemoryStats


class Idle(Event, frozen=True):
    """No command is running or waiting."""


class EngineEnded(Event, frozen=True):
    """The engine's process has ended and its work is lost; `message` says why. `Engine.restart` starts another."""

    message: str


class EngineLost(Event, frozen=True):
    """The connection to the engine is cut. The engine continues its work, and the app tries to reconnect."""

    message: str


class EngineBack(Event, frozen=True):
    """The engine is connected again. The events that it emitted meanwhile follow."""


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
"""Events that report a current state. Of each type, only the newest event matters."""


def is_opened(event: Event) -> bool:
    """Return whether the opening of a model has ended, successfully or not. The caller then turns garbage collection on again."""
    return isinstance(event, ModelReady | Idle | EngineEnded | EngineLost) or (
        isinstance(event, OpenFailed) and not event.classes_follow
    )


def result_of(event: Event, job: Job[Parameters, Partial, Result]) -> Result | None:
    """Return the result of this job if the event reports one, otherwise None."""
    return cast("Result", event.result) if isinstance(event, JobDone) and event.ask.job == job.name else None


def partial_of(event: Event, job: Job[Parameters, Partial, Result]) -> Partial | None:
    """Return the result so far of this job if the event reports one, otherwise None."""
    return cast("Partial", event.result) if isinstance(event, JobGrown) and event.ask.job == job.name else None
