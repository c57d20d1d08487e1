"""The commands that the worker runs, and the requests that change its queue. `queue.merge` orders them, and `run_commands` runs
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import dtype_engine
from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe
from dtype_engine.worker.message import Message
from dtype_engine.worker.save_requests import SaveRequest

if TYPE_CHECKING:
    import dtype_engine.results.drift

JobName = Literal[
    "measure",
    "inputs",
    "recipe",
    "flow",
    "causes",
    "generate",
    "speed",
    "activations",
    "check",
    "download",
    "over-memory",
    "scan",
    "recipes",
    "values",
    "write",
    "nonfinite",
    "losses",
    "floor",
    "weights",
]

READ_ONLY = "this session is read-only: no files are read or written in it"
"""The message with which a read-only session refuses a command that names a path."""


# -- requests that change the queue at once -----------------------------------------------------------------------------


class SetRecipe(Message, frozen=True):
    """Cast the model to `recipe` and measure its drift. Running work on the previous recipe is stopped, except saves and
    downloads.
    """

    recipe: Recipe


class FollowRecipe(Message, frozen=True):
    """Make `recipe` the current recipe. Its rules differ from those of the recipe before, but give every tensor the same dtype. The
    metrics measured before therefore stay valid. If there are none, the new recipe is measured.
    """

    recipe: Recipe


class SetSettings(Message, frozen=True):
    """Use `settings` for all later forward passes of the cast model, and measure the current recipe again."""

    settings: RunSettings


class Pause(Message, frozen=True):
    """Pause scans if `paused` is True; otherwise, resume them."""

    paused: bool


class Cancel(Message, frozen=True):
    """Stop the running command and drop the waiting ones. If `name` is given, stop or drop only commands with this name. The
    current recipe stays the same. If the casts to this recipe are stopped halfway, the next command completes them.
    """

    name: str | None = None


# -- commands that run on the worker's thread ---------------------------------------------------------------------------


class Command(Message, frozen=True):
    """A request that waits in the queue until the worker's thread runs it, for the recipe that is then the current one."""

    name: ClassVar[JobName]
    rank: ClassVar[int] = 3
    """The rank of the command in the queue: commands of a lower rank run first."""
    once: ClassVar[bool] = True
    """Whether at most one command of this type waits in the queue: a newer one then replaces the waiting one."""
    needs_model: ClassVar[bool] = True
    """Whether the command can run only on a live model. If False, the files of a checkpoint suffice."""
    names_path: ClassVar[bool] = False
    """Whether the command names files to read or to write. An engine that is opened read-only refuses it."""
    finishes: ClassVar[bool] = False
    """Whether only the user can stop the command while it runs. If False, a newer recipe or newer inputs can stop it too."""


class SetInputs(Command, frozen=True):
    """Run the model on the inputs that `line` names: a prompt, or the paths of files. Then measure the current recipe on them. A
    running command on the previous inputs is stopped. It runs again if the new inputs are refused.
    """

    name = "inputs"
    rank = 0
    names_path = True
    line: str


class Measure(Command, frozen=True):
    """Cast to the current recipe and measure its drift."""

    name = "measure"
    rank = 1
    needs_model = False
    read_values: bool = False
    """Whether to read many bytes of the checkpoint's files, if this is necessary to count the weight values that casts make
    infinite or zero. This is used only if the model is not loaded.
    """
    in_full: bool = False
    """Whether to run all inputs and compare the outputs of modules over all of them. If a measurement is already running, it is
    extended to all inputs.
    """


class ApplyRecipe(Command, frozen=True):
    """Cast the model to the current recipe without measuring its drift."""

    name = "recipe"
    rank = 2


class FollowUp(Command, frozen=True):
    """A command that the worker runs after a measurement to complete it, for example to find out why the output is not finite. In
    the app, the measurement and its follow-ups appear as one job.
    """

    rank = 2


class FindNonfinite(FollowUp, frozen=True):
    """Find out why the output in the measurement `report` is not finite, and find a rule that makes it finite."""

    name = "nonfinite"
    report: dtype_engine.results.drift.DriftReport


class FindLossRemedy(FollowUp, frozen=True):
    """Find rules that prevent the current recipe's casts from making weight values infinite or zero."""

    name = "losses"
    report: dtype_engine.results.drift.DriftReport | None
    """The drift of the recipe, or None if the model can't be run."""


class CountStoredLosses(FollowUp, frozen=True):
    """Read the checkpoint's files to count the weight values that the casts of the recipe make infinite or zero. This is used if
    the model could not be loaded.
    """

    name = "losses"
    needs_model = False
    read_values: bool


class MeasureFloor(FollowUp, frozen=True):
    """Measure the noise floor: the drift of the reference from itself when the same arithmetic runs in another order. This is done
    once for each set of inputs, when no other command is waiting.
    """

    name = "floor"
    rank = 4


class CompareWeights(FollowUp, frozen=True):
    """Compare each weight, as the current recipe casts it, with the same weight of the checkpoint that serves as the reference.
    This runs when no other command is waiting.
    """

    name = "weights"
    rank = 4


class TraceCasts(Command, frozen=True):
    """Record the implicit casts of one forward pass. An implicit cast happens inside an operation that receives a tensor in another
    dtype than the one in which it computes.
    """

    name = "flow"


class AttributeDrift(Command, frozen=True):
    """Find the modules that cause the drift of the output, by casting one module at a time and measuring the drift."""

    name = "causes"


class MeasureSpeed(Command, frozen=True):
    """Time forward passes in three versions of the model: in the dtypes of the reference, of the checkpoint, and of the current
    recipe.
    """

    name = "speed"


class EstimateActivations(Command, frozen=True):
    """Estimate the peak memory of activations in forward passes over `batch` sequences, for each sequence length (in tokens) in
    `contexts`.
    """

    name = "activations"
    contexts: tuple[int, ...]
    batch: int


class CheckFiles(Command, frozen=True):
    """Check the files of the model for problems, such as missing or damaged tensors."""

    name = "check"
    needs_model = False


class Download(Command, frozen=True):
    """Download the whole model from its hub, and open it. Before this command, only the headers of its files have been read."""

    name = "download"
    needs_model = False
    names_path = True  # it writes files
    finishes = True


class OpenOverMemory(Command, frozen=True):
    """Open the model again to run it from the disk, because it is larger than the memory."""

    name = "over-memory"
    needs_model = False
    finishes = True


class Generate(Command, frozen=True):
    """Generate `tokens` tokens twice: with the float32 reference, and with the model cast to the current recipe (the candidate)."""

    name = "generate"
    tokens: int
    prompt: str = ""
    """The text to continue, or "" to continue the model's inputs."""


class Scan(Command, frozen=True):
    """Scan the model: estimate, for every weight and every dtype in `dtypes`, how much the output drifts if only this weight is
    cast to this dtype. Resumes the last scan if it had the same dtypes. A newer recipe interrupts the scan.
    """

    name = "scan"
    dtypes: tuple[str, ...]
    keep: bool = False
    """Whether to save the scan to a file on the engine's machine, from which a later engine can resume it. An engine that is opened
    read-only saves none.
    """


class MeasureRecipes(Command, frozen=True):
    """Measure the recipes in `recipes` without making any of them the current one. If the user changes the current recipe
    meanwhile, the new recipe is measured first, and then this command continues.
    """

    name = "recipes"
    recipes: tuple[Recipe, ...]


class InspectWeight(Command, frozen=True):
    """Read one tensor's values, and report how often each exponent occurs and the error of casting the tensor to each dtype in
    `targets`.
    """

    name = "values"
    once = False
    needs_model = False
    tensor: str
    targets: tuple[str, ...]


class Save(Command, frozen=True):
    """Write the file or folder that `request` names, for the recipe that was current when the app sent the request."""

    name = "write"
    once = False
    needs_model = False
    names_path = True
    finishes = True
    request: SaveRequest
    recipe: Recipe


Request = SetRecipe | FollowRecipe | SetSettings | Pause | Cancel | Command
FromTheApp = (
    SetRecipe
    | FollowRecipe
    | SetSettings
    | Pause
    | Cancel
    | SetInputs
    | Measure
    | TraceCasts
    | AttributeDrift
    | MeasureSpeed
    | EstimateActivations
    | CheckFiles
    | Download
    | OpenOverMemory
    | Generate
    | Scan
    | MeasureRecipes
    | InspectWeight
)
"""The requests of this module that the app sends. The worker creates all other commands itself."""
