"""The commands that change the session or the queue. Those that only ask for a result are rows of the table in `jobs.py`."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe
from dtype_engine.service.message import Message
from dtype_engine.service.save_requests import SaveRequest

IDLE_RANK = 4
"""The rank of commands that run when no other command is waiting, and that any other command stops."""
READ_ONLY = "this session is read-only: no files are read or written in it"
"""The message with which a read-only session refuses a command that names a path."""


# -- requests that change the queue at once -----------------------------------------------------------------------------


class SetRecipe(Message, frozen=True):
    """Cast the model to `recipe` and measure its drift. Stops work on the previous recipe, except saves and downloads."""

    recipe: Recipe


class FollowRecipe(Message, frozen=True):
    """Make `recipe` the current recipe. Its rules differ from those of the last recipe, but give every tensor the same dtype, so
    that the last recipe's metrics stay valid. If there are no metrics, the new recipe is measured.
    """

    recipe: Recipe


class SetSettings(Message, frozen=True):
    """Use `settings` for all later passes of the cast model, and measure the current recipe again."""

    settings: RunSettings


class Pause(Message, frozen=True):
    """Pause scans, or resume them."""

    paused: bool


class Cancel(Message, frozen=True):
    """Stop the running command and drop the waiting ones. If `name` is given, only commands with this name are stopped and dropped.
    If casts to the current recipe are stopped halfway, the next command completes them.
    """

    name: str | None = None


# -- commands that run on the worker's thread ---------------------------------------------------------------------------


class Traits(msgspec.Struct, frozen=True):
    """How the queue treats a command."""

    name: str
    """The name by which the app shows and cancels the command."""
    rank: int = 3
    """Commands of a lower rank run first."""
    once: bool = True
    """Whether a newer command replaces a waiting one of the same name."""
    needs_model: bool = True
    """Whether the command needs a live model. If False, the files of a checkpoint suffice."""
    names_path: bool = False
    """Whether the command names files to read or to write. A read-only engine refuses it."""
    finishes: bool = False
    """Whether only the user can stop the running command; a newer recipe or newer inputs can't."""
    follows: bool = False
    """Whether the command runs after a measurement to complete it. In the app, both appear as one job."""


class Command(Message, frozen=True):
    """A request that waits until the worker's thread runs it, for the recipe that is then the current one."""

    traits: ClassVar[Traits]

    @property
    def name(self) -> str:
        return self.traits.name


class SetInputs(Command, frozen=True):
    """Use the inputs that `line` names: a prompt, or the paths of files. Then measure the current recipe on them. A command that
    was stopped for the new inputs runs again if they are refused.
    """

    traits = Traits("inputs", rank=0, names_path=True)
    line: str


class Measure(Command, frozen=True):
    """Cast to the current recipe and measure its drift."""

    traits = Traits("measure", rank=1, needs_model=False)
    read_values: bool = False
    """Whether to read many bytes of files to count the values that casts lose, if the model is not loaded."""
    in_full: bool = False
    """Whether to run all inputs and compare the outputs of modules over all of them. Extends a running measurement."""


class ApplyRecipe(Command, frozen=True):
    """Cast the model to the current recipe without measuring its drift."""

    traits = Traits("recipe", rank=2)


class CountStoredLosses(Command, frozen=True):
    """Count the weight values in the files that the recipe's casts make infinite or zero, if the model could not be loaded."""

    traits = Traits("losses", rank=2, needs_model=False, follows=True)
    read_values: bool


class Download(Command, frozen=True):
    """Download the whole model, of which only headers have been read, and open it."""

    traits = Traits("download", needs_model=False, names_path=True, finishes=True)  # it writes files


class OpenOverMemory(Command, frozen=True):
    """Open the model again to run it from the disk, because it is larger than the memory."""

    traits = Traits("over-memory", needs_model=False, finishes=True)


class Scan(Command, frozen=True):
    """Estimate, for every weight and every dtype in `dtypes`, how much the output drifts if only this weight is cast to this dtype.
    Resumes the last scan if it had the same dtypes. A newer recipe interrupts the scan.
    """

    traits = Traits("scan")
    dtypes: tuple[str, ...]
    keep: bool = False
    """Whether to save the scan on the engine's machine, so that a later engine can resume it. A read-only engine saves none."""


class MeasureRecipes(Command, frozen=True):
    """Measure several recipes without making any of them the current one. A newer recipe is measured first."""

    traits = Traits("recipes")
    recipes: tuple[Recipe, ...]


class Save(Command, frozen=True):
    """Write the file or folder of `request`, for the recipe that was current when the app sent the request."""

    traits = Traits("write", once=False, needs_model=False, names_path=True, finishes=True)
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
    | Download
    | OpenOverMemory
    | Scan
    | MeasureRecipes
)
"""The requests of this module that the app sends. The worker creates all other commands itself."""
OWN_NAMES = {kind.traits.name for kind in Command.__subclasses__()}
"""The names of the commands of this module."""
