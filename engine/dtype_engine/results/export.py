"""The results of an export and of its verification, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from dtype_engine.results.coverage import Coverage
from dtype_engine.results.drift import OutputDrift
from dtype_engine.results.losses import ValueLoss


@dataclass(frozen=True, slots=True)
class ExportedDtype:
    """The number of an export's tensors that have one dtype, and their bytes, scales included."""

    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export: what was written, where, and how fast."""

    folder: str
    model: str
    rules: tuple[str, ...]
    config_dtype: str
    nbytes: int
    """The bytes of all tensors, scales included, file headers excluded."""
    files: tuple[str, ...]
    """The files with weights, within the folder."""
    dtypes: dict[str, ExportedDtype]
    seconds: float
    notices: tuple[str, ...] = ()
    lost: tuple[ValueLoss, ...] = ()
    """The weights of which the cast made values infinite or zero, or clipped them."""
    coverage: Coverage | None = None
    """Which tensors of the model's architecture, or else of the index, the source checkpoint has. None if both are unknown."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor of an export that differs from the tensor which the recipe computes from the source."""

    name: str
    what: str
    """The difference, in words that follow the tensor's name in a sentence."""


@dataclass(frozen=True, slots=True)
class ComparedTensor:
    """A tensor of a checkpoint that another program wrote, compared with the tensor of its source."""

    name: str
    source_dtype: str
    dtype: str
    elements: int
    differing: int | None
    """How many elements differ from the source's tensor after `Tensor.to`. Two NaN are equal. None if this tensor was decoded from
    codes with scales, which `Tensor.to` does not make.
    """
    max_abs: float
    """The largest difference from the source's tensor; infinity if a value is finite in only one of them."""

    @property
    def exact(self) -> bool:
        """Whether the tensor equals the source's, cast with rounding to nearest."""
        return self.differing == 0


@dataclass(frozen=True, slots=True)
class CastReport:
    """A comparison of two checkpoints: one that another program wrote, and the model from which it was made (its source)."""

    folder: str
    model: str
    nbytes: int
    """The bytes of the tensors that were compared, in the checkpoint's dtypes."""
    tensors: tuple[ComparedTensor, ...]
    differences: tuple[TensorDifference, ...]
    """Tensors that only the checkpoint or only its source has, and tensors whose shapes in the two differ."""
    uncompared: tuple[TensorDifference, ...]
    """Weights whose codes this program does not decode, each with the reason."""
    seconds: float
    unchecked: tuple[str, ...] = ()
    """Sentences about what was not compared, and may differ."""

    @property
    def same(self) -> bool:
        """Whether every tensor is an exact cast of its counterpart in the source, and none is missing, new or left uncompared."""
        return not self.differences and not self.uncompared and all(tensor.exact for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """A comparison of an export with the tensors that its recipe makes of the exported model (its source)."""

    folder: str
    model: str
    rules: tuple[str, ...]
    tensors: int
    """How many tensors were compared bit for bit. Other loaders read both sides, so an error of our reader can't hide a
    difference.
    """
    nbytes: int
    differences: tuple[TensorDifference, ...]
    seconds: float
    drift_before: OutputDrift | None = None
    """The drift of the source, cast in memory by the recipe, from the float32 reference. None if not measured."""
    drift_after: OutputDrift | None = None
    """The drift of the model loaded from the export, from the same reference. It equals `drift_before` if the export is exact."""
    unchecked: tuple[str, ...] = ()
    """Sentences about what was not compared, and may differ."""
    lost: tuple[ValueLoss, ...] = ()
    """The weights of which the cast made values infinite or zero, according to the export's recipe file."""

    @property
    def same(self) -> bool:
        return not self.differences and repr(self.drift_before) == repr(self.drift_after)  # NaN equals itself here
