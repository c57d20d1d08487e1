"""The interface of an engine, which may run in a thread of this process, in another process or on another machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from dtype_engine.worker.commands import Request
    from dtype_engine.worker.save_requests import SaveRequest


class Engine(ABC):
    """An engine for the app. Every method returns at once, and events report the result."""

    can_restart: ClassVar[bool] = False
    """Whether `restart` works. It ends even a computation that can't be cancelled, and opens the model again."""

    @property
    def host(self) -> str:
        """The name of the machine to which exports and reports are written; empty for this machine."""
        return ""

    @abstractmethod
    def start(self) -> None:
        """Start opening the model."""

    @abstractmethod
    def request(self, request: Request) -> None:
        """Add a command to the queue, or change the queue (see `commands`)."""

    @abstractmethod
    def save(self, request: SaveRequest) -> None:
        """Write what `request` names, for the current recipe. Only `Cancel` stops it."""

    @abstractmethod
    def plan_export(self) -> None:
        """Emit what an export of the current recipe would write, once the model is open. This does not wait for commands."""

    @abstractmethod
    def check_path(self, path: str, for_export: bool) -> None:
        """Emit whether a path is taken on the machine that would write there: a folder for an export, otherwise a file. This does
        not wait for anything.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop everything."""

    def restart(self) -> None:
        """End the engine and start another with the current recipe, settings and inputs. Only where `can_restart`."""
        raise RuntimeError("an engine in this process can't be started again")
