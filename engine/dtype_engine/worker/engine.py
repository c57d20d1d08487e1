"""What the app asks of an engine, wherever it runs: a thread of this process, another process, another machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from dtype_engine.worker.commands import Request
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
        """Put a command in the queue, or change the queue (see `commands`)."""

    @abstractmethod
    def save(self, request: SaveRequest) -> None:
        """Write what is requested, of the recipe in force now. Only `Cancel` stops it."""

    @abstractmethod
    def plan_export(self) -> None:
        """Emit what an export of the recipe in force would write. This is arithmetic: it waits for the model to be open and for
        nothing else.
        """

    @abstractmethod
    def check_path(self, path: str) -> None:
        """Emit whether something is where it would write. This waits for nothing."""

    @abstractmethod
    def close(self) -> None:
        """Stop everything."""

    def restart(self) -> None:
        """End the engine and start another, with the recipe, the settings and the inputs in force. Only where `can_restart`."""
        raise RuntimeError("an engine in this process can't be started again")
