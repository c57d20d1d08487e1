"""What the worker can be asked for, as data: `queue.merge` orders it, `run_commands` carries it out."""

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
    """Cast to `recipe` and measure it; whatever runs for another recipe stops."""

    recipe: Recipe


class FollowRecipe(Message, frozen=True):
    """Take over another recipe that plans the same; measure it only where the one in force has no figures."""

    recipe: Recipe


class SetSettings(Message, frozen=True):
    """Run candidates with these settings from now on, and measure the recipe in force again."""

    settings: RunSettings


class Pause(Message, frozen=True):
    """Hold a scan where it is, or resume it."""

    paused: bool


class Cancel(Message, frozen=True):
    """Stop the running command and drop the waiting ones; with a name, only those of that name. The recipe stays: its casts are
    completed at the next command.
    """

    name: str | None = None


# -- commands that run on the worker's thread ---------------------------------------------------------------------------


class Command(Message, frozen=True):
    """Runs for the recipe that is in force when it begins.

    rank: commands of a lower rank run first. once: asked for again while it waits, it runs once. needs_model: it can't run
    on a checkpoint's files alone. finishes: only the user stops it, no newer command.
    """

    name: ClassVar[JobName]
    rank: ClassVar[int] = 3
    once: ClassVar[bool] = True
    needs_model: ClassVar[bool] = True
    finishes: ClassVar[bool] = False


class SetInputs(Command, frozen=True):
    """Run on the inputs that `line` names (see `core.input_args.parse_inputs_line`), then measure. What runs for the old ones
    stops; it runs again where the new ones are refused.
    """

    name = "inputs"
    rank = 0
    line: str


class Measure(Command, frozen=True):
    """Cast to the recipe in force and measure its drift.

    read_values: without a live model, count lost values however many bytes must be read. in_full: run all inputs, however precise
    the figures are before that, and compare all rows of the modules' outputs; a measurement under way goes on to that.
    """

    name = "measure"
    rank = 1
    needs_model = False
    read_values: bool = False
    in_full: bool = False


class ApplyRecipe(Command, frozen=True):
    """Cast to the recipe in force without measuring it."""

    name = "recipe"
    rank = 2


class FollowUp(Command, frozen=True):
    """A part of a measurement that comes after its figures, or without them. To the user it is still the measurement."""

    rank = 2


class FindNonfinite(FollowUp, frozen=True):
    """Find why the measured output is not finite, and what makes it finite."""

    name = "nonfinite"
    report: dtype_engine.results.drift.DriftReport


class FindLossRemedy(FollowUp, frozen=True):
    """Find the rules that keep the values which the casts lose. `report`: None where the model can't be run."""

    name = "losses"
    report: dtype_engine.results.drift.DriftReport | None


class CountStoredLosses(FollowUp, frozen=True):
    """Count from the files what the casts lose, where there is no live model."""

    name = "losses"
    needs_model = False
    read_values: bool


class MeasureFloor(FollowUp, frozen=True):
    """Measure the reference against itself, once for the inputs in use, while there is nothing else to do."""

    name = "floor"
    rank = 4


class TraceCasts(Command, frozen=True):
    """Trace the implicit casts of one forward pass."""

    name = "flow"


class AttributeDrift(Command, frozen=True):
    """Run each module cast by itself: which modules does the drift arise in?"""

    name = "causes"


class MeasureSpeed(Command, frozen=True):
    """Time forward passes."""

    name = "speed"


class CheckFiles(Command, frozen=True):
    """Check the files of the model for what is wrong with them."""

    name = "check"
    needs_model = False


class Generate(Command, frozen=True):
    """Generate `tokens` tokens with reference and candidate."""

    name = "generate"
    tokens: int


class Scan(Command, frozen=True):
    """Scan the sensitivity of every weight in these dtypes, or resume that scan; a newer recipe is measured in between.

    keep: what is done is kept in a file of the engine's machine, and the same scan goes on from that, whichever engine it was.
    """

    name = "scan"
    dtypes: tuple[str, ...]
    keep: bool = False


class MeasureRecipes(Command, frozen=True):
    """Measure these recipes, whatever recipe is in force; a newer recipe is measured in between."""

    name = "recipes"
    recipes: tuple[Recipe, ...]


class InspectWeight(Command, frozen=True):
    """Read one tensor's values: exponents, and the error of a cast to each target."""

    name = "values"
    once = False
    needs_model = False
    tensor: str
    targets: tuple[str, ...]


class Save(Command, frozen=True):
    """Write what is requested, for the recipe that was in force when it was."""

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
"""What the app asks for, class by class; all other commands follow from it."""
