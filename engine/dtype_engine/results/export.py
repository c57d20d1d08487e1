"""The results of an export and of its verification, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from dtype_engine.results.coverage import Coverage
from dtype_engine.results.drift import OutputDrift
from dtype_engine.results.losses import ValueLoss


@dataclass(frozen=True, slots=True)
class ExportedDtype:
    """How much of an export is in one dtype. `nbytes` includes the scales of storage-only dtypes."""

    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExportReport:
    """A checkpoint that was written."""

    folder: str
    model: str
    rules: tuple[str, ...]
    config_dtype: str
    nbytes: int
    """Bytes of all tensors, scales included, headers excluded."""
    files: tuple[str, ...]
    """The files that contain weights."""
    dtypes: dict[str, ExportedDtype]
    seconds: float
    notices: tuple[str, ...] = ()
    lost: tuple[ValueLoss, ...] = ()
    """The weights whose cast loses values."""
    coverage: Coverage | None = None
    """How many tensors of the model, or of the index, the source has; None where neither is known."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor of an export that differs from what its recipe makes of the source."""

    name: str
    what: str
    """How the tensor differs."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The comparison of an export with what its recipe makes of the source."""

    folder: str
    model: str
    rules: tuple[str, ...]
    tensors: int
    """How many tensors were compared, bit for bit, as the loaders of other programs read them."""
    nbytes: int
    differences: tuple[TensorDifference, ...]
    seconds: float
    drift_before: OutputDrift | None = None
    """The drift of the source under the recipe; None where drift was not to be measured."""
    drift_after: OutputDrift | None = None
    """The drift of the weights that were loaded back from the export, against the same reference."""
    unchecked: tuple[str, ...] = ()
    """What was not compared, one sentence each."""
    lost: tuple[ValueLoss, ...] = ()
    """The losses that the recipe file in the export records."""

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences and repr(self.drift_before) == repr(self.drift_after)  # NaN equals itself here
