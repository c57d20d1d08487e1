"""The result of a check of executions: how far the outputs of the same weights move under another execution."""

from __future__ import annotations

from dataclasses import dataclass

from dtype_engine.core.text import brief
from dtype_engine.core.units import plural
from dtype_engine.results.drift import OutputDrift


@dataclass(frozen=True, slots=True)
class ExecutionRow:
    """The drift between the model as it is cast and the same model under another execution, such as another batch."""

    execution: str
    """The execution, such as "batch=8 padding=left"."""
    output: OutputDrift | None
    """None if the model can't be executed so."""
    first: str | None = None
    """The first module, in the order of their calls, whose output differs, or None if none was seen to differ."""
    why_not: str = ""
    """Why the model can't be executed so."""


@dataclass(frozen=True, slots=True)
class ExecutionReport:
    """How far the outputs of one model move under other executions. All runs have the same weights and dtypes."""

    model: str
    device: str
    rules: tuple[str, ...]
    inputs: str
    rows: tuple[ExecutionRow, ...]

    def __repr__(self) -> str:
        return brief(f"ExecutionReport: {plural(len(self.rows), 'execution')} of {self.model} on {self.device}")
