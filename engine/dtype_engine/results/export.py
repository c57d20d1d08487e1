"""What an export and its verification report, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from dtype_engine.results.coverage import Coverage
from dtype_engine.results.drift import OutputDrift
from dtype_engine.results.losses import ValueLoss


@dataclass(frozen=True, slots=True)
class ExportedDtype:
    """How much of an export is in one dtype. `nbytes` includes the scales of a storage-only one."""

    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExportReport:
    """A checkpoint that was written. `nbytes`: of its tensors, scales included, headers not; `files`: with the weights;
    `lost`: the weights whose cast loses values.
    """

    folder: str
    model: str
    rules: tuple[str, ...]
    config_dtype: str
    nbytes: int
    files: tuple[str, ...]
    dtypes: dict[str, ExportedDtype]
    seconds: float
    notices: tuple[str, ...] = ()
    lost: tuple[ValueLoss, ...] = ()
    coverage: Coverage | None = None
    """How many tensors of the model, or of the index, the source has; None where neither is known."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor of an exported checkpoint that is not what its recipe makes of the source, and how."""

    name: str
    what: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """An exported checkpoint against its source and the recipe in it.

    `tensors` were compared, bit for bit, as other programs' loaders read them. unchecked: what was not compared, a sentence each.
    lost: the weights of which the export's own recipe file says that the cast lost values.
    The drift is that of the source under the recipe, and that of the weights as loaded back from the export, both against the
    source's reference; None where it was not asked for.
    """

    folder: str
    model: str
    rules: tuple[str, ...]
    tensors: int
    nbytes: int
    differences: tuple[TensorDifference, ...]
    seconds: float
    drift_before: OutputDrift | None = None
    drift_after: OutputDrift | None = None
    unchecked: tuple[str, ...] = ()
    lost: tuple[ValueLoss, ...] = ()

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences and repr(self.drift_before) == repr(self.drift_after)  # NaN equals itself here
