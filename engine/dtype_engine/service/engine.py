"""The interface of an engine, which may run in a thread of this process, in another process or on another machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from dtype_engine.service.commands import Request
    from dtype_engine.service.save_requests import SaveRequest

CLOSE_WAIT_S = 2.0


class Engine(ABC):
    """The engine as the app uses it. Methods return at once; results arrive as events."""

    can_restart: ClassVar[bool] = False
    """Whether `restart` is supported."""

    @property
    def host(self) -> str:
        """The machine on which the engine writes exports and reports, or "" for this machine."""
        return ""

    @abstractmethod
    def start(self) -> None:
        """Start opening the model. Once it is open, the current recipe is measured."""

    @abstractmethod
    def request(self, request: Request) -> None:
        """Add a command to the queue, or change the queue, for example by `Cancel`."""

    @abstractmethod
    def save(self, request: SaveRequest) -> None:
        """Write the file or folder of `request`, for the current recipe. Only `Cancel` can stop it."""

    @abstractmethod
    def plan_export(self) -> None:
        """Ask for an `ExportPlanned` event. It comes once the model is open, even while commands run."""

    @abstractmethod
    def check_path(self, path: str, for_export: bool) -> None:
        """Ask for a `PathChecked` event, which comes at once. for_export: whether `path` is an export's folder, else a file."""

    @abstractmethod
    def close(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Stop all work and end the engine. Waits at most about `wait_s` seconds for work that can't be interrupted."""

    def restart(self) -> None:
        """End the engine, even in a computation that can't be cancelled, and start another with the current recipe, settings
        and inputs. Call this only if `can_restart`.
        """
        raise RuntimeError("an engine in this process can't be started again")
