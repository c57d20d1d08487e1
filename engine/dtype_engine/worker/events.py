"""Everything the worker says, on one page.

Events come in order, from the worker's threads. Those that speak of a recipe carry it: what a pane shows
belongs to the recipe in force, or is not shown.

Annotations name classes of `dtype_engine.results` in full and import none of them: data classes take milliseconds to be made, and
the first paint needs no figure. `messages.py`, where msgspec looks them up, imports them.
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
    """Something that the worker says."""


class LoadingProgress(Event, frozen=True):
    """The model is being opened; `step` says what is done now, in a few words. About `done` of `total` of the whole is done; a
    total of 0: that is not known.
    """

    step: str
    done: int = 0
    total: int = 0


class HeadersRead(Event, frozen=True):
    """All headers of the checkpoint are read; `tree` takes the place of what was seen at first glance."""

    tree: Tree
    notices: tuple[str, ...] = ()


class ModelReady(Event, frozen=True):
    """The live model is there. `tree` knows classes, ties and buffers; `no_forward` says why it can't be run, if so."""

    tree: Tree
    class_name: str
    device: str
    seconds: float
    inputs: str
    notices: tuple[str, ...]
    no_forward: str | None = None


class InputsReady(Event, frozen=True):
    """What the model is run on from now on; all that was measured before was on other inputs."""

    reading: dtype_engine.results.inputs.InputsSummary


class InputsRefused(Event, frozen=True):
    """Inputs that were asked for do not fit, or can't be read: those before stay in force."""

    message: str


class OpenFailed(Event, frozen=True):
    """The model could not be opened. The tree of the headers, if there was one, is all there will be, unless that with the
    module classes follows.
    """

    message: str
    classes_follow: bool = False


class CastingProgress(Event, frozen=True):
    """Tensors are being cast, `done` of `total`."""

    recipe: Recipe
    done: int
    total: int


class CastDone(Event, frozen=True):
    """Every tensor now has its planned dtype, where there is a live model; `lost` has those whose values did not all survive,
    None where that was not looked for, and `reason` says why."""

    recipe: Recipe
    lost: tuple[dtype_engine.results.losses.ValueLoss, ...] | None
    reason: str = ""


class LossRemedyFound(Event, frozen=True):
    """The rules that keep the values which the recipe loses, and the drift without and with them."""

    recipe: Recipe
    found: dtype_engine.results.attribution.LossRemedy


class MeasuringProgress(Event, frozen=True):
    """A measurement is under way: its pass now is `run`, "reference" or "candidate"; `done` of `total` elements of the inputs, over
    all passes that are to be run.
    """

    recipe: Recipe
    run: str
    done: int
    total: int


class WorkingProgress(Event, frozen=True):
    """Something else that takes time is under way: `what`, in a few words, and `done` of `total` steps of it."""

    recipe: Recipe
    what: str
    done: int
    total: int


class ModulesMeasured(Event, frozen=True):
    """Drift of some modules as the candidate's pass goes by, over the inputs so far. A module's newer reading replaces its
    older one."""

    recipe: Recipe
    modules: tuple[dtype_engine.results.drift.ModuleDrift, ...]


class OutputMeasured(Event, frozen=True):
    """Drift of the main output over the sequences of a measurement that were run so far; `settings` are those it is run with."""

    recipe: Recipe
    settings: RunSettings
    reading: dtype_engine.results.drift.PartialDrift


class Measured(Event, frozen=True):
    """A measurement is complete, or as precise as was asked for; `settings` are those it was run with."""

    recipe: Recipe
    report: dtype_engine.results.drift.DriftReport
    settings: RunSettings = RunSettings()


class NoiseFloorMeasured(Event, frozen=True):
    """The drift of the reference against itself, over the inputs in use."""

    floor: dtype_engine.results.attribution.NoiseFloor


class NonfiniteFound(Event, frozen=True):
    """Why the output just measured is not finite, and what mends it."""

    recipe: Recipe
    found: dtype_engine.results.attribution.NonFiniteDiagnosis


class AttributionReady(Event, frozen=True):
    """Which modules the drift arises in, as asked for."""

    recipe: Recipe
    report: dtype_engine.results.attribution.AttributionReport


class ImplicitCastsTraced(Event, frozen=True):
    """The implicit casts of one forward pass, as asked for."""

    recipe: Recipe
    casts: tuple[dtype_engine.results.drift.ImplicitCastStats, ...]


class Generated(Event, frozen=True):
    """What reference and candidate wrote, as asked for."""

    recipe: Recipe
    texts: tuple[dtype_engine.results.runs.Generation, ...]


class SpeedMeasured(Event, frozen=True):
    """How long forward passes take, as asked for."""

    recipe: Recipe
    report: dtype_engine.results.runs.SpeedReport


class FilesChecked(Event, frozen=True):
    """What is wrong with the files of the model, as asked for."""

    recipe: Recipe
    report: dtype_engine.results.check.CheckReport


class WeightInspected(Event, frozen=True):
    """The values of one tensor, as asked for."""

    recipe: Recipe
    name: str
    reading: dtype_engine.results.weights.WeightStats


class ExportPlanned(Event, frozen=True):
    """What an export of this recipe would write; `plan` is None where it can't be exported, and `reason` says why."""

    recipe: Recipe
    plan: ExportPlan | None
    reason: str = ""


class PathChecked(Event, frozen=True):
    """Whether a file, or a folder that is not empty, is at a path of the engine's machine; `reason` says why nothing can be."""

    path: str
    taken: bool
    reason: str = ""


class SavingProgress(Event, frozen=True):
    """Something is being written: `what`, in a few words, and `done` of `total` bytes. Heard whatever recipe is in force by now."""

    recipe: Recipe
    what: str
    done: int
    total: int


class Saved(Event, frozen=True):
    """What was asked to be written is there, or is not (`done`), and the sentence says what and where, or why not."""

    recipe: Recipe
    done: bool
    sentence: str
    notices: tuple[str, ...] = ()


class Composed(Event, frozen=True):
    """The text of a file that whoever asked for it writes, on another machine than the engine's."""

    recipe: Recipe
    text: str
    notices: tuple[str, ...] = ()


class ScanUpdated(Event, frozen=True):
    """The estimates of a scan so far; they belong to no recipe. `finished` when all of its inputs have gone by."""

    report: dtype_engine.results.scan.ScanReport
    finished: bool


class RecipeMeasured(Event, frozen=True):
    """One of several recipes was measured, whichever is in force; `settings` are those it was run with."""

    report: dtype_engine.results.drift.DriftReport
    settings: RunSettings = RunSettings()


class Noticed(Event, frozen=True):
    """Something that the user should know of what is under way."""

    message: str


class Failed(Event, frozen=True):
    """What was under way for this recipe ended in an error; the session goes on. `module` is to blame, where one is."""

    recipe: Recipe
    message: str
    module: str | None = None


class Refused(Event, frozen=True):
    """What was asked for can't be done, or failed; nothing that was measured is less true for it. `job`: its name, or that of the
    part of a measurement, after its figures, that failed (see `commands.JobName`).
    """

    job: JobName
    message: str


class Stopped(Event, frozen=True):
    """The user stopped `job` (None where nothing had begun), and what waited was `dropped` with it (a newer command that supersedes
    something says nothing).
    """

    recipe: Recipe
    job: JobName | None
    dropped: tuple[JobName, ...] = ()


class Jobs(Event, frozen=True):
    """What is under way ("" while nothing) and what waits, in its order, by their `commands.JobName`. Emitted when it changes."""

    running: JobName | Literal[""]
    waiting: tuple[JobName, ...]


class Memory(Event, frozen=True):
    """Memory now; about four times a second while work goes on, and once when it ends."""

    recipe: Recipe
    reading: dtype_engine.results.memory.MemoryStats


class Idle(Event, frozen=True):
    """Nothing is under way."""


class EngineEnded(Event, frozen=True):
    """The engine's process is gone, with what it was doing; `message` says why. `Engine.restart` starts another."""

    message: str


class EngineLost(Event, frozen=True):
    """The connection to the engine is cut; it goes on with what it does, and is looked for until it is there again."""

    message: str


class EngineBack(Event, frozen=True):
    """The engine is connected again; what it told meanwhile follows."""


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
"""Events that say how things stand: only the newest of a type counts."""


def is_opened(event: Event) -> bool:
    """Whether nothing more of the model's opening follows: what was imported and made is there to stay, or the engine is gone."""
    return isinstance(event, ModelReady | Idle | EngineEnded | EngineLost) or (
        isinstance(event, OpenFailed) and not event.classes_follow
    )
