"""The commands that the worker understands, as data. `queue.merge` orders them, and `run_commands` runs them."""

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
    "check",
    "scan",
    "recipes",
    "values",
    "write",
    "nonfinite",
    "losses",
    "floor",
]


# -- requests that change the queue at once -----------------------------------------------------------------------------


class SetRecipe(Message, frozen=True):
    """Cast to `recipe` and measure it. Work for another recipe is stopped."""

    recipe: Recipe


class FollowRecipe(Message, frozen=True):
    """Replace the current recipe by one with the same plan, so that metrics stay valid. Without metrics, it is measured."""

    recipe: Recipe


class SetSettings(Message, frozen=True):
    """Use the given settings for all candidates from now on, and measure the current recipe again."""

    settings: RunSettings


class Pause(Message, frozen=True):
    """Pause scans if `paused` is True; otherwise, resume them."""

    paused: bool


class Cancel(Message, frozen=True):
    """Stop the running command and drop the waiting ones. With a name, stop or drop only the commands with this name. The recipe
    stays the same, and the next command completes the casts of the recipe.
    """

    name: str | None = None


# -- commands that run on the worker's thread ---------------------------------------------------------------------------


class Command(Message, frozen=True):
    """A request that waits in the queue until the worker's thread runs it, for the recipe that is then the current one."""

    name: ClassVar[JobName]
    rank: ClassVar[int] = 3
    """The rank of the command in the queue: commands of a lower rank run first."""
    once: ClassVar[bool] = True
    """Whether a newer command of the same type replaces a waiting one."""
    needs_model: ClassVar[bool] = True
    """Whether the command can run only on a live model. If False, the files of a checkpoint suffice."""
    finishes: ClassVar[bool] = False
    """Whether newer commands let this one finish. Only the user can then stop it."""


class SetInputs(Command, frozen=True):
    """Use the inputs that `line` names, which is a prompt or the paths of files, and measure. Work on the old inputs stops; if the
    new inputs are refused, it is run again.
    """

    name = "inputs"
    rank = 0
    line: str


class Measure(Command, frozen=True):
    """Cast to the current recipe and measure its drift."""

    name = "measure"
    rank = 1
    needs_model = False
    read_values: bool = False
    """Whether to count lost values without a live model even if this means reading many bytes of the files."""
    in_full: bool = False
    """Whether to run all inputs and compare modules over all of them. A measurement that is already running is extended."""


class ApplyRecipe(Command, frozen=True):
    """Cast to the current recipe without measuring it."""

    name = "recipe"
    rank = 2


class FollowUp(Command, frozen=True):
    """A command that completes a measurement, such as counting lost values. For the user, both are one measurement."""

    rank = 2


class FindNonfinite(FollowUp, frozen=True):
    """Find why the measured output is not finite, and a rule that makes it finite."""

    name = "nonfinite"
    report: dtype_engine.results.drift.DriftReport


class FindLossRemedy(FollowUp, frozen=True):
    """Find rules that keep the values which the current recipe's casts lose."""

    name = "losses"
    report: dtype_engine.results.drift.DriftReport | None
    """The drift of the recipe, or None if the model can't be run."""


class CountStoredLosses(FollowUp, frozen=True):
    """Count the values that the casts lose by reading the files. This is used if there is no live model."""

    name = "losses"
    needs_model = False
    read_values: bool


class MeasureFloor(FollowUp, frozen=True):
    """Measure the noise floor, once for each set of inputs, when no other command is waiting."""

    name = "floor"
    rank = 4


class TraceCasts(Command, frozen=True):
    """Trace the implicit casts of one forward pass."""

    name = "flow"


class AttributeDrift(Command, frozen=True):
    """Cast one module at a time, to find the modules in which the drift arises."""

    name = "causes"


class MeasureSpeed(Command, frozen=True):
    """Time forward passes in the dtypes of the reference, of the checkpoint and of the recipe."""

    name = "speed"


class CheckFiles(Command, frozen=True):
    """Check the files of the model for problems, such as missing or damaged tensors."""

    name = "check"
    needs_model = False


class Generate(Command, frozen=True):
    """Generate `tokens` tokens with the reference and the candidate."""

    name = "generate"
    tokens: int


class Scan(Command, frozen=True):
    """Scan the sensitivity of every weight in these dtypes, or resume that scan. A newer recipe interrupts the scan."""

    name = "scan"
    dtypes: tuple[str, ...]
    keep: bool = False
    """Whether to save the scan to a file on the engine's machine, from which a later engine can resume it."""


class MeasureRecipes(Command, frozen=True):
    """Measure these recipes without making any of them the current one. This command is interrupted to measure a newer recipe."""

    name = "recipes"
    recipes: tuple[Recipe, ...]


class InspectWeight(Command, frozen=True):
    """Read one tensor's values. Report their exponents, and the error of a cast to each target dtype."""

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
    | CheckFiles
    | Generate
    | Scan
    | MeasureRecipes
    | InspectWeight
)
"""The requests that the app sends. The worker creates all other commands itself."""
