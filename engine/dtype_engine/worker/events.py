"""Everything the worker says, on one page. Named tuples, since they are made before the first paint and
data classes take five times as long to be made.

Events come in order, from the worker's threads. Those that speak of a recipe carry it: what a pane shows
belongs to the recipe in force, or is not shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from dtype_engine.core.options import RunSettings

if TYPE_CHECKING:
    from dtype_engine.core.tree import Tree
    from dtype_engine.recipe import Recipe
    from dtype_engine.results.attribution import AttributionReport, LossRemedy, NoiseFloor, NonFiniteDiagnosis
    from dtype_engine.results.drift import DriftReport, ImplicitCastStats, ModuleDrift, PartialDrift
    from dtype_engine.results.inputs import InputsSummary
    from dtype_engine.results.losses import ValueLoss
    from dtype_engine.results.memory import MemoryStats
    from dtype_engine.results.runs import Generation, SpeedReport
    from dtype_engine.results.scan import ScanReport
    from dtype_engine.results.weights import WeightStats
    from dtype_engine.worker.commands import JobName
    from dtype_engine.worker.save_requests import ExportPlan


class LoadingProgress(NamedTuple):
    """The model is being opened; `step` says what is done now, in a few words. About `done` of `total` of the whole is done; a
    total of 0: that is not known.
    """

    step: str
    done: int = 0
    total: int = 0


class HeadersRead(NamedTuple):
    """All headers of the checkpoint are read; `tree` takes the place of what was seen at first glance."""

    tree: Tree
    notices: tuple[str, ...] = ()


class ModelReady(NamedTuple):
    """The live model is there. `tree` knows classes, ties and buffers; `no_forward` says why it can't be run, if so."""

    tree: Tree
    class_name: str
    device: str
    seconds: float
    inputs: str
    notices: tuple[str, ...]
    no_forward: str | None = None


class InputsReady(NamedTuple):
    """What the model is run on from now on; all that was measured before was on other inputs."""

    reading: InputsSummary


class InputsRefused(NamedTuple):
    """Inputs that were asked for do not fit, or can't be read: those before stay in force."""

    message: str


class OpenFailed(NamedTuple):
    """The model could not be opened. The tree of the headers, if there was one, is all there will be, unless that with the
    module classes follows.
    """

    message: str
    classes_follow: bool = False


class CastingProgress(NamedTuple):
    """Tensors are being cast, `done` of `total`."""

    recipe: Recipe
    done: int
    total: int


class CastDone(NamedTuple):
    """Every tensor now has its planned dtype, where there is a live model; `lost` has those whose values did not all survive,
    None where that was not looked for, and `reason` says why."""

    recipe: Recipe
    lost: tuple[ValueLoss, ...] | None
    reason: str = ""


class LossRemedyFound(NamedTuple):
    """The rules that keep the values which the recipe loses, and the drift without and with them."""

    recipe: Recipe
    found: LossRemedy


class MeasuringProgress(NamedTuple):
    """A measurement is under way: its pass now is `run`, "reference" or "candidate"; `done` of `total` elements of the inputs, over
    all passes that are to be run.
    """

    recipe: Recipe
    run: str
    done: int
    total: int


class WorkingProgress(NamedTuple):
    """Something else that takes time is under way: `what`, in a few words, and `done` of `total` steps of it."""

    recipe: Recipe
    what: str
    done: int
    total: int


class ModulesMeasured(NamedTuple):
    """Drift of some modules as the candidate's pass goes by, over the inputs so far. A module's newer reading replaces its
    older one."""

    recipe: Recipe
    modules: tuple[ModuleDrift, ...]


class OutputMeasured(NamedTuple):
    """Drift of the main output over the sequences of a measurement that were run so far; `settings` are those it is run with."""

    recipe: Recipe
    settings: RunSettings
    reading: PartialDrift


class Measured(NamedTuple):
    """A measurement is complete, or as precise as was asked for; `settings` are those it was run with."""

    recipe: Recipe
    report: DriftReport
    settings: RunSettings = RunSettings()


class NoiseFloorMeasured(NamedTuple):
    """The drift of the reference against itself, over the inputs in use."""

    floor: NoiseFloor


class NonfiniteFound(NamedTuple):
    """Why the output just measured is not finite, and what mends it."""

    recipe: Recipe
    found: NonFiniteDiagnosis


class AttributionReady(NamedTuple):
    """Which modules the drift arises in, as asked for."""

    recipe: Recipe
    report: AttributionReport


class ImplicitCastsTraced(NamedTuple):
    """The implicit casts of one forward pass, as asked for."""

    recipe: Recipe
    casts: tuple[ImplicitCastStats, ...]


class Generated(NamedTuple):
    """What reference and candidate wrote, as asked for."""

    recipe: Recipe
    texts: tuple[Generation, ...]


class SpeedMeasured(NamedTuple):
    """How long forward passes take, as asked for."""

    recipe: Recipe
    report: SpeedReport


class WeightInspected(NamedTuple):
    """The values of one tensor, as asked for."""

    recipe: Recipe
    name: str
    reading: WeightStats


class ExportPlanned(NamedTuple):
    """What an export of this recipe would write; `plan` is None where it can't be exported, and `reason` says why."""

    recipe: Recipe
    plan: ExportPlan | None
    reason: str = ""


class PathChecked(NamedTuple):
    """Whether a file, or a folder that is not empty, is at a path of the engine's machine; `reason` says why nothing can be."""

    path: str
    taken: bool
    reason: str = ""


class SavingProgress(NamedTuple):
    """Something is being written: `what`, in a few words, and `done` of `total` bytes. Heard whatever recipe is in force by now."""

    recipe: Recipe
    what: str
    done: int
    total: int


class Saved(NamedTuple):
    """What was asked to be written is there, or is not (`done`), and the sentence says what and where, or why not."""

    recipe: Recipe
    done: bool
    sentence: str
    notices: tuple[str, ...] = ()


class Composed(NamedTuple):
    """The text of a file that whoever asked for it writes, on another machine than the engine's."""

    recipe: Recipe
    text: str
    notices: tuple[str, ...] = ()


class ScanUpdated(NamedTuple):
    """The estimates of a scan so far; they belong to no recipe. `finished` when all of its inputs have gone by."""

    report: ScanReport
    finished: bool


class RecipeMeasured(NamedTuple):
    """One of several recipes was measured, whichever is in force; `settings` are those it was run with."""

    report: DriftReport
    settings: RunSettings = RunSettings()


class Noticed(NamedTuple):
    """Something that the user should know of what is under way."""

    message: str


class Failed(NamedTuple):
    """What was under way for this recipe ended in an error; the session goes on. `module` is to blame, where one is."""

    recipe: Recipe
    message: str
    module: str | None = None


class Refused(NamedTuple):
    """What was asked for can't be done, or failed; nothing that was measured is less true for it. `job`: its name, or that of the
    part of a measurement, after its figures, that failed (see `commands.JobName`).
    """

    job: JobName
    message: str


class Stopped(NamedTuple):
    """The user stopped `job` (None where nothing had begun), and what waited was `dropped` with it (a newer command that supersedes
    something says nothing).
    """

    recipe: Recipe
    job: JobName | None
    dropped: tuple[JobName, ...] = ()


class Jobs(NamedTuple):
    """What is under way ("" while nothing) and what waits, in its order, by their `commands.JobName`. Emitted when it changes."""

    running: JobName | Literal[""]
    waiting: tuple[JobName, ...]


class Memory(NamedTuple):
    """Memory now; about four times a second while work goes on, and once when it ends."""

    recipe: Recipe
    reading: MemoryStats


class Idle(NamedTuple):
    """Nothing is under way."""


class EngineEnded(NamedTuple):
    """The engine's process is gone, with what it was doing; `message` says why. `Engine.restart` starts another."""

    message: str


class EngineLost(NamedTuple):
    """The connection to the engine is cut; it goes on with what it does, and is looked for until it is there again."""

    message: str


class EngineBack(NamedTuple):
    """The engine is connected again; what it told meanwhile follows."""


Event = (
    LoadingProgress
    | HeadersRead
    | ModelReady
    | InputsReady
    | InputsRefused
    | OpenFailed
    | CastingProgress
    | CastDone
    | MeasuringProgress
    | ModulesMeasured
    | OutputMeasured
    | Measured
    | RecipeMeasured
    | Noticed
    | NoiseFloorMeasured
    | NonfiniteFound
    | LossRemedyFound
    | AttributionReady
    | WorkingProgress
    | ImplicitCastsTraced
    | Generated
    | SpeedMeasured
    | WeightInspected
    | ExportPlanned
    | PathChecked
    | SavingProgress
    | Saved
    | Composed
    | ScanUpdated
    | Failed
    | Refused
    | Jobs
    | Stopped
    | Memory
    | Idle
    | EngineEnded
    | EngineLost
    | EngineBack
)
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
