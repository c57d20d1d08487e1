"""The results of an export and of its verification, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from dtype_engine.results.coverage import Coverage
from dtype_engine.results.drift import OutputDrift
from dtype_engine.results.losses import ValueLoss


@dataclass(frozen=True, slots=True)
class ExportedDtype:
    """One dtype of an export: the number of tensors that have it, and their bytes, including scales if the dtype is a format with
    scales, such as float8.
    """

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
    """The bytes of all tensors in the export, scales included, file headers excluded."""
    files: tuple[str, ...]
    """The names of the files that contain weights, within the export's folder."""
    dtypes: dict[str, ExportedDtype]
    seconds: float
    notices: tuple[str, ...] = ()
    lost: tuple[ValueLoss, ...] = ()
    """The weights with values that their cast made infinite or zero, or clipped, with the numbers of such values."""
    coverage: Coverage | None = None
    """How many of the model's tensors are in the source checkpoint. If the model's tensors are unknown, those that the checkpoint's
    index lists are counted. None if there is no index either.
    """


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor of an export that differs from the tensor which the recipe computes from the source."""

    name: str
    what: str
    """How the tensor differs, in words that follow the tensor's name in a sentence."""


@dataclass(frozen=True, slots=True)
class ComparedTensor:
    """A tensor of a checkpoint that another program wrote, compared with the tensor of its source."""

    name: str
    source_dtype: str
    dtype: str
    elements: int
    differing: int | None
    """How many elements differ from the source's tensor after `Tensor.to` has cast that tensor to this tensor's dtype. Two NaN
    count as equal. None if this tensor was decoded from codes with scales, because these do not come from `Tensor.to`.
    """
    max_abs: float
    """The largest absolute difference between this tensor and the source's tensor; infinity if a value is finite in only one of
    them.
    """

    @property
    def exact(self) -> bool:
        """Whether the tensor equals the source's tensor, cast to this tensor's dtype with rounding to nearest."""
        return self.differing == 0


@dataclass(frozen=True, slots=True)
class CastReport:
    """The comparison of a checkpoint that another program wrote with its source, the model from which it was made."""

    folder: str
    model: str
    nbytes: int
    """Bytes of the tensors that were compared, in the checkpoint's dtypes."""
    tensors: tuple[ComparedTensor, ...]
    differences: tuple[TensorDifference, ...]
    """Tensors that only the checkpoint or only its source has, and tensors whose shapes in the two differ."""
    uncompared: tuple[TensorDifference, ...]
    """Weights that could not be compared, because this program does not decode their codes, each with the reason."""
    seconds: float
    unchecked: tuple[str, ...] = ()
    """Sentences for the user about what was not compared, and may differ."""

    @property
    def same(self) -> bool:
        """Whether every tensor is an exact cast of the source's tensor, and none is missing, new or left uncompared."""
        return not self.differences and not self.uncompared and all(tensor.exact for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The comparison of an export with the tensors that its recipe gives when it is applied to the source, the model that was
    exported.
    """

    folder: str
    model: str
    rules: tuple[str, ...]
    tensors: int
    """How many tensors of the export were compared bit for bit. The export and its source are both read with other programs'
    loaders, so that an error of this program's own reader can't hide a difference.
    """
    nbytes: int
    differences: tuple[TensorDifference, ...]
    seconds: float
    drift_before: OutputDrift | None = None
    """The drift of the source model, cast in memory by the export's recipe, from the float32 reference. None if drift was not
    measured.
    """
    drift_after: OutputDrift | None = None
    """The drift of the model that is loaded from the export, from the same reference as `drift_before`. The two are equal if the
    export is exact. None if drift was not measured.
    """
    unchecked: tuple[str, ...] = ()
    """Sentences for the user about what was not compared, and may differ."""
    lost: tuple[ValueLoss, ...] = ()
    """The weights with values that their cast made infinite or zero, as recorded in the export's recipe file."""

    @property
    def same(self) -> bool:
        """Whether every tensor of the export equals the one that its recipe gives when it is applied to the source."""
        return not self.differences and repr(self.drift_before) == repr(self.drift_after)  # NaN equals itself here
