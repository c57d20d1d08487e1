"""The results of an export and of its verification, as plain data."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from dtype_engine.core.dtypes import short_name
from dtype_engine.core.text import brief
from dtype_engine.core.units import human_bytes, plural
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

    def __repr__(self) -> str:
        dtypes = (f"{each.tensors:,} in {short_name(name)}" for name, each in self.dtypes.items())
        return brief(
            f"ExportReport: {self.model}, {human_bytes(self.nbytes)} in {plural(len(self.files), 'file')}",
            ("folder", self.folder),
            ("rules", ", ".join(self.rules) or "none: as stored"),
            ("tensors", ", ".join(dtypes)),
            ("lost", f"values of {plural(len(self.lost), 'weight')}" if self.lost else ""),
        )


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

    def __repr__(self) -> str:
        inexact = sum(not tensor.exact for tensor in self.tensors)
        return brief(
            f"CastReport: {self.folder} against {self.model}",
            ("tensors", f"{len(self.tensors):,}, of which {inexact:,} are no exact cast"),
            ("differs", _first(self.differences)),
            ("unread", _first(self.uncompared)),
        )


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
    rounded: int = 0
    """How many of the tensors have values that a rounding such as GPTQ chose. They were not computed again: their scales and codes
    are of the format and, unless `unchecked` says otherwise, their layers' errors are no larger than with the nearest values.
    """

    @property
    def same(self) -> bool:
        return not self.differences and _figures(self.drift_before) == _figures(self.drift_after)

    def __repr__(self) -> str:
        return brief(
            f"VerifyReport: {self.folder} against {self.model}: {'' if self.same else 'not '}the same, bit for bit",
            ("rules", ", ".join(self.rules) or "none: as stored"),
            ("tensors", f"{self.tensors:,}, {human_bytes(self.nbytes)}"),
            ("differs", _first(self.differences)),
            ("drift", "" if self.drift_after is None else f"max |Δ| {self.drift_after.max_abs:.4e} loaded back"),
        )


def _figures(output: OutputDrift | None) -> str:
    return "" if output is None else repr(astuple(output))  # NaN equals itself here


def _first(differences: tuple[TensorDifference, ...]) -> str:
    more = f" and {len(differences) - 1:,} more" if len(differences) > 1 else ""
    return "".join(f"{each.name} {each.what}{more}" for each in differences[:1])
