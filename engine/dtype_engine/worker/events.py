"""All events that the worker emits.

Events come in order, from the worker's threads. An event about a recipe contains that recipe, so that a pane can ignore events
about any recipe but the current one.

Annotations name classes of `dtype_engine.results` in full and do not import them: making data classes takes milliseconds, and the
first paint needs none of them. `messages.py`, where msgspec looks them up, imports them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import dtype_engine
from dtype_engine.core.options import RunSettings
from dtype_engine.core.tree import Tree
from dtype_engine.recipe import Recipe
from dtype_engine.worker.commands import JobName
from dtype_engine.worker.message import Message
from dtype_engine.worker.save_requests import ExportPlan

if TYPE_CHECKING:
    import dtype_engine.results.attribution
    import dtype_engine.results.check
    import dtype_engine.results.drift
    import dtype_engine.results.inputs
    import dtype_engine.results.losses
    import dtype_engine.results.memory
    import dtype_engine.results.runs
    import dtype_engine.results.scan
    import dtype_engine.results.weights


class Event(Message, frozen=True):
    """The base class of all events."""


class LoadingProgress(Event, frozen=True):
    """The model is being opened. About `done` of `total` is done; a total of 0 means that this is not known."""

    step: str
    """The current step in a few words."""
    done: int = 0
    total: int = 0


class HeadersRead(Event, frozen=True):
    """All headers of the checkpoint are read. `tree` replaces the tree that the app has read from some of them."""

    tree: Tree
    notices: tuple[str, ...] = ()


class ModelReady(Event, frozen=True):
    """The model is loaded."""

    tree: Tree
    """It has the module classes, ties and buffers."""
    class_name: str
    device: str
    seconds: float
    inputs: str
    notices: tuple[str, ...]
    no_forward: str | None = None
    """Why the model can't be run; None where it can."""


class InputsReady(Event, frozen=True):
    """The inputs that the model is run on from now on. Earlier measurements were made on other inputs."""

    summary: dtype_engine.results.inputs.InputsSummary


class InputsRefused(Event, frozen=True):
    """New inputs do not fit the model or can't be read, so the inputs before stay in use."""

    message: str


class OpenFailed(Event, frozen=True):
    """The model could not be opened, so there is at most the tree of its headers."""

    message: str
    classes_follow: bool = False
    """Whether a `HeadersRead` with the module classes follows."""


class CastingProgress(Event, frozen=True):
    """The tensors are being cast: `done` of `total`."""

    recipe: Recipe
    done: int
    total: int


class CastDone(Event, frozen=True):
    """If there is a live model, all its tensors now have their planned dtypes."""

    recipe: Recipe
    lost: tuple[dtype_engine.results.losses.ValueLoss, ...] | None
    """The tensors whose cast loses values; None where that was not counted."""
    reason: str = ""
    """Why that was not counted."""


class LossRemedyFound(Event, frozen=True):
    """Rules that keep the values which the recipe loses, and the drift without and with them."""

    recipe: Recipe
    found: dtype_engine.results.attribution.LossRemedy


class MeasuringProgress(Event, frozen=True):
    """A measurement is running. `done` of `total` elements of the inputs are done, counted over all its passes."""

    recipe: Recipe
    run: str
    """The pass that runs now: "reference" or "candidate"."""
    done: int
    total: int


class WorkingProgress(Event, frozen=True):
    """Another long command is running, and has done `done` of `total` steps."""

    recipe: Recipe
    what: str
    """The current step in a few words."""
    done: int
    total: int


class ModulesMeasured(Event, frozen=True):
    """The drift of some modules over the inputs that were run so far. Newer figures of a module replace its older ones."""

    recipe: Recipe
    modules: tuple[dtype_engine.results.drift.ModuleDrift, ...]


class OutputMeasured(Event, frozen=True):
    """The drift of the main output over the sequences that a running measurement has done so far, with its settings."""

    recipe: Recipe
    settings: RunSettings
    drift: dtype_engine.results.drift.PartialDrift


class Measured(Event, frozen=True):
    """A measurement is complete, or has reached the wanted precision. `settings` are those that it was run with."""

    recipe: Recipe
    report: dtype_engine.results.drift.DriftReport
    settings: RunSettings = RunSettings()


class NoiseFloorMeasured(Event, frozen=True):
    """The noise floor, measured over the current inputs."""

    floor: dtype_engine.results.attribution.NoiseFloor


class NonfiniteFound(Event, frozen=True):
    """Why the output that was measured is not finite, and a rule that makes it finite."""

    recipe: Recipe
    found: dtype_engine.results.attribution.NonFiniteDiagnosis


class AttributionReady(Event, frozen=True):
    """The modules in which the drift arises: the answer to `AttributeDrift`."""

    recipe: Recipe
    report: dtype_engine.results.attribution.AttributionReport


class ImplicitCastsTraced(Event, frozen=True):
    """The implicit casts of one forward pass: the answer to `TraceCasts`."""

    recipe: Recipe
    casts: tuple[dtype_engine.results.drift.ImplicitCastStats, ...]


class Generated(Event, frozen=True):
    """The texts that reference and candidate generated: the answer to `Generate`."""

    recipe: Recipe
    texts: tuple[dtype_engine.results.runs.Generation, ...]


class SpeedMeasured(Event, frozen=True):
    """How long forward passes take: the answer to `MeasureSpeed`."""

    recipe: Recipe
    report: dtype_engine.results.runs.SpeedReport


class FilesChecked(Event, frozen=True):
    """What is wrong with the files of the model, as asked for."""

    recipe: Recipe
    report: dtype_engine.results.check.CheckReport


class WeightInspected(Event, frozen=True):
    """Statistics of one tensor's values: the answer to `InspectWeight`."""

    recipe: Recipe
    name: str
    stats: dtype_engine.results.weights.WeightStats


class ExportPlanned(Event, frozen=True):
    """What an export of this recipe would write. `plan` is None where it can't be exported; `reason` then says why."""

    recipe: Recipe
    plan: ExportPlan | None
    reason: str = ""


class PathChecked(Event, frozen=True):
    """Whether a path on the engine's machine is taken by a file or a folder with files. `reason`: why it can't be written."""

    path: str
    taken: bool
    reason: str = ""


class SavingProgress(Event, frozen=True):
    """A save is running, and has written `done` of `total` bytes. The app shows this whatever the current recipe is."""

    recipe: Recipe
    what: str
    """The current step in a few words."""
    done: int
    total: int


class Saved(Event, frozen=True):
    """A save has ended."""

    recipe: Recipe
    done: bool
    """Whether everything was written."""
    sentence: str
    """What was written and where, or why nothing was."""
    notices: tuple[str, ...] = ()


class Composed(Event, frozen=True):
    """The text of a file that the app writes, because it runs on another machine than the engine."""

    recipe: Recipe
    text: str
    notices: tuple[str, ...] = ()


class ScanUpdated(Event, frozen=True):
    """The estimates of a scan so far, which belong to no recipe. `finished`: all of its inputs were run."""

    report: dtype_engine.results.scan.ScanReport
    finished: bool


class RecipeMeasured(Event, frozen=True):
    """One of several recipes was measured, which need not be the current one. `settings` are those that it was run with."""

    report: dtype_engine.results.drift.DriftReport
    settings: RunSettings = RunSettings()


class Noticed(Event, frozen=True):
    """A note to the user about the running command."""

    message: str


class Failed(Event, frozen=True):
    """The measurement of this recipe ended in an error; the session goes on."""

    recipe: Recipe
    message: str
    module: str | None = None
    """The module that caused the error, if one did."""


class Refused(Event, frozen=True):
    """A command can't be run, or it failed. The figures that were measured before stay valid."""

    job: JobName
    """The command, or the part of a measurement after its figures, that failed."""
    message: str


class Stopped(Event, frozen=True):
    """The user stopped a command. Nothing is emitted where a newer command supersedes an older one."""

    recipe: Recipe
    job: JobName | None
    """The command that ran; None where none did."""
    dropped: tuple[JobName, ...] = ()
    """The commands that waited and were dropped."""


class Jobs(Event, frozen=True):
    """The command that runs ("" where none does) and those that wait, in their order. Emitted when this changes."""

    running: JobName | Literal[""]
    waiting: tuple[JobName, ...]


class Memory(Event, frozen=True):
    """The memory in use. Emitted about four times a second while a command runs, and once when it ends."""

    recipe: Recipe
    stats: dtype_engine.results.memory.MemoryStats


class Idle(Event, frozen=True):
    """No command runs or waits."""


class EngineEnded(Event, frozen=True):
    """The engine's process has ended, and its work is lost; `message` says why. `Engine.restart` starts another."""

    message: str


class EngineLost(Event, frozen=True):
    """The connection to the engine is cut. The engine goes on working, and the app tries to reconnect."""

    message: str


class EngineBack(Event, frozen=True):
    """The engine is connected again. The events that it emitted in the meantime follow."""


REPLACEABLE = (
    LoadingProgress,
    CastingProgress,
    MeasuringProgress,
    WorkingProgress,
    SavingProgress,
    OutputMeasured,
    Memory,
    Jobs,
    ScanUpdated,
)
"""Events that report a current state, so that only the newest of each type matters."""


def is_opened(event: Event) -> bool:
    """Whether the opening of the model has ended, successfully or not, so that no more long-lived objects are made."""
    return isinstance(event, ModelReady | Idle | EngineEnded | EngineLost) or (
        isinstance(event, OpenFailed) and not event.classes_follow
    )
