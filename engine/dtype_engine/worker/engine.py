"""What the app asks of an engine, wherever it runs: a thread of this process, another process, another machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from dtype_engine.worker.commands import (
    AttributeDrift,
    Cancel,
    FollowRecipe,
    Generate,
    InspectWeight,
    Measure,
    MeasureSpeed,
    Pause,
    Request,
    Scan,
    SetInputs,
    SetRecipe,
    SetSettings,
    TraceCasts,
)

if TYPE_CHECKING:
    from dtype_engine.core.options import RunSettings
    from dtype_engine.recipe import Recipe
    from dtype_engine.worker.save_requests import SaveRequest


class Engine(ABC):
    """Every method returns at once; events tell what came of it."""

    can_restart: ClassVar[bool] = False
    """Whether `restart` ends what runs, however deep in a kernel it is, and opens the model anew."""

    @property
    def host(self) -> str:
        """Where it writes exports and reports, as the user calls it; empty for this machine."""
        return ""

    @abstractmethod
    def start(self) -> None:
        """Begin to open the model."""

    @abstractmethod
    def request(self, request: Request) -> None:
        """Put a command in the queue, or change the queue."""

    @abstractmethod
    def save(self, request: SaveRequest) -> None:
        """Write what is requested, of the recipe in force now. Only `cancel` stops it."""

    @abstractmethod
    def plan_export(self) -> None:
        """Emit what an export of the recipe in force would write. This is arithmetic: it waits for the model to be open and for
        nothing else.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop everything."""

    def restart(self) -> None:
        """End the engine and start another, with the recipe, the settings and the inputs in force."""
        raise NotImplementedError

    def set_recipe(self, recipe: Recipe) -> None:
        """Cast to `recipe` and measure it; whatever runs for another recipe stops."""
        self.request(SetRecipe(recipe))

    def follow_recipe(self, recipe: Recipe) -> None:
        """Take over another recipe that plans the same: it is measured only where the one in force has not been."""
        self.request(FollowRecipe(recipe))

    def measure(self) -> None:
        """Measure the recipe in force once more."""
        self.request(Measure(read_values=True))

    def set_settings(self, settings: RunSettings) -> None:
        """Run candidates with these settings from now on, and measure the recipe in force with them."""
        self.request(SetSettings(settings))

    def set_inputs(self, line: str) -> None:
        """Run on other inputs from now on, as `input_args.typed` reads the line, and measure the recipe in force on them.

        What runs for the old ones stops; it runs again where the new ones are refused.
        """
        self.request(SetInputs(line))

    def flow(self) -> None:
        """Trace the implicit casts of one forward pass under the recipe in force."""
        self.request(TraceCasts())

    def causes(self) -> None:
        """Find which modules the drift of the recipe in force arises in."""
        self.request(AttributeDrift())

    def generate(self, tokens: int) -> None:
        """Generate text with reference and candidate."""
        self.request(Generate(tokens))

    def speed(self) -> None:
        """Time forward passes."""
        self.request(MeasureSpeed())

    def scan(self, dtypes: tuple[str, ...]) -> None:
        """Scan in these dtypes, or resume that scan; a newer recipe is measured in between."""
        self.request(Scan(dtypes))

    def pause(self, waiting: bool) -> None:
        """Hold a scan where it is, or resume it."""
        self.request(Pause(waiting))

    def inspect_weight(self, name: str, targets: tuple[str, ...]) -> None:
        """Read one tensor's values: exponents, and the error of a cast to each of `targets`."""
        self.request(InspectWeight(name, targets))

    def cancel(self, name: str | None = None) -> None:
        """Stop the running command and drop what waits. The recipe stays; its casts are completed at the next command.

        name: only commands of this name (see `commands.JobName`); everything else runs on or waits.
        """
        self.request(Cancel(name))
