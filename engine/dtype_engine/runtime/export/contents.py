"""The contents of an exported checkpoint as plain data."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from dtype_engine.checkpoint import ByteRange, CheckpointTensor, FileIdentity
from dtype_engine.checkpoint.schemes import CodedWeight
from dtype_engine.checkpoint.schemes.own import codes_names, input_scale_name, parts_in
from dtype_engine.core import dtypes
from dtype_engine.core.file_layouts import FileLayout
from dtype_engine.core.options import RunSettings
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes, plural
from dtype_engine.recipe import Recipe
from dtype_engine.results.coverage import Coverage
from dtype_engine.results.rounding import FittedTo
from dtype_engine.runtime.export.layout import PLAIN, Layout
from dtype_engine.runtime.formats.row_blocks import finite_amax
from dtype_engine.runtime.formats.scales import Scales
from dtype_engine.runtime.weights.pieces import Pieces
from dtype_engine.runtime.weights.source import WeightSource


@dataclass(eq=False)
class SharedScale:
    """A single scale for several tensors, computed from the largest |value| of all of them."""

    names: tuple[str, ...]
    """The names that the tensors have in the source."""
    sources: Sequence[WeightSource]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _amax: float | None = None

    def amax(self) -> float:
        """Return the largest finite |value| of all tensors. The tensors are read only by the first call, in whatever thread."""
        with self._lock:
            if self._amax is None:
                self._amax = max(finite_amax(Pieces(source)) for source in self.sources)
            return self._amax


@dataclass(frozen=True, slots=True)
class InputScale:
    """The calibrated scale with which a runtime quantizes the inputs of a layer in NVFP4."""

    value: float | None = None
    """None until the calibration has run the model."""
    seen: bool = True
    """Whether any calibration pass called this layer. A layer that was not called gets the scale of similar layers."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a file of the export."""

    name: str
    dtype: str
    """The dtype under torch's name, such as `float8_e4m3fn`."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtypes.BY_NAME[self.dtype].bits // 8


class RoundedValues(Protocol):
    """The values that a rounding chose for a weight of the export."""

    def read(self) -> tuple[torch.Tensor, Scales]:
        """Return (values of the format, float32 in the shape of the weight; the scales of its blocks or channels)."""


@dataclass(frozen=True, slots=True)
class ExportTensor:
    """One weight of the export."""

    name: str
    shape: tuple[int, ...]
    stored: str
    """The dtype of the weight in the source. It ends in `@tensor` if the source stores a single scale for the whole weight."""
    dtype: str
    """The dtype of the weight in the export, without a rounding. It ends in `@tensor` if the export has a single scale for the
    whole weight.
    """
    has_scales: bool
    """Whether the export stores this weight as codes and scales."""
    portable: bool
    """Whether the export stores this weight in a layout that other programs read."""
    source_bytes: tuple[ByteRange, ...]
    """The byte ranges of the weight's data and scales in the source's files, if they can be copied unchanged."""
    source: WeightSource
    """The source of the weight's values, which the export casts to `dtype` unless it copies bytes."""
    shared: SharedScale | None = None
    """The scale that this weight shares with others that runtimes or transformers join with it into one tensor."""
    quantised_inputs: bool = False
    """Whether `config.json` declares that the inputs of this weight's layer are quantized, too."""
    input_scale: InputScale | None = None
    """The scale for quantizing this layer's inputs, if the format stores one."""
    packed_into: str = ""
    """The name of the live model's weight into which loading packs this weight together with others; "" if it is not packed."""

    coded: CodedWeight | None = None
    """How another program, for example GPTQ, quantized the weight in the source; None if none did."""

    rounding: str = ""
    """The rounding by which the values are chosen, such as "gptq"; "" for the nearest values."""
    rounded: RoundedValues | None = None
    """The values that the rounding chose, or None if it left the nearest ones, or was not fitted yet."""

    copies: tuple[CheckpointTensor, ...] = ()
    """The source's tensors that the export copies unchanged, if another program quantized the weight. If they hold several
    weights, such as stacked experts, only the first of these weights lists them.
    """

    file_layout: FileLayout | None = None
    """The layout of a weight with scales, or None for that of compressed-tensors or of this program."""

    computed: str = ""
    """The dtype of its values for torchao, which computes with them, if the weight is in torchao's layout."""

    of_draft: bool = False
    """Whether it belongs to a draft head, which transformers does not load."""

    @property
    def copied(self) -> bool:
        """Whether the export copies this weight's tensors unchanged from a source that another program quantized."""
        return self.coded is not None and self.dtype == self.stored

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """The tensors that hold this weight in the file: codes, scales, further tensors of the format, and finally the scale of
        the layer's inputs. Scales are [channels, 1] for a matrix, [1] for a single scale, or [blocks down, blocks across]. In
        another layout, they are its `parts`.
        """
        if self.copied:
            return tuple(TensorEntry(each.name, each.dtype, each.shape) for each in self.copies)
        if not self.has_scales:
            return (TensorEntry(self.name, dtypes.BY_NAME[self.dtype].torch_name, self.shape),)
        if self.file_layout is not None:
            layer = self.name.removesuffix("weight")
            parts = self.file_layout.parts(self.shape, self.dtype)
            return tuple(TensorEntry(layer + part.suffix, part.dtype, part.shape) for part in parts)
        theirs, own = codes_names(self.name, self.dtype)
        codes, *rest = parts_in(self.shape, self.dtype)
        found = [TensorEntry(theirs if self.portable else own, codes.dtype, codes.shape)]
        found += [TensorEntry(self.name + part.suffix, part.dtype, part.shape) for part in rest]
        if self.input_scale is not None:
            found.append(TensorEntry(input_scale_name(self.name), "float32", (1,)))
        return tuple(found)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True)
class Contents:
    """The contents of an export: everything about it except the folder to which it is written."""

    title: str
    items: tuple[ExportTensor, ...]
    recipe: Recipe
    config: dict[str, Any] | None = None
    """The `config.json` of the source checkpoint, if it has one."""
    folder: Path | None = None
    """The folder of the source checkpoint, from which files without weights are copied."""
    linears: tuple[str, ...] = ()
    """The names of the model's linear modules. `quantization_config` must list those of them that stay unquantized."""
    notices: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    layout: Layout = PLAIN
    identities: tuple[FileIdentity, ...] = ()
    """The size, modification time and inode of each of `files`, recorded before the file was read. They reveal later changes."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Maps each omitted name of a tied weight to the name under which the weight is written."""
    settings: RunSettings = field(default_factory=RunSettings)
    """The settings with which the model under the recipe runs. If they quantize activations, `config.json` says so."""
    coverage: Coverage | None = None
    """How many of the model's tensors the source has; if the model is unknown, of the tensors that the source's index lists."""
    incomplete: tuple[str, ...] = ()
    """Sentences for the user that name the tensors which the source lacks."""
    otherwise: tuple[str, ...] = ()
    """Sentences for the user, without their final dot, about tensors that loaders give another dtype than was measured."""
    passed: str = ""
    """The dtype to pass to diffusers for a model of several dtypes, so that every weight has the dtype of the export; or ""."""
    fitted_to: FittedTo | None = None
    """The calibration inputs to which the roundings were fitted. None if there are none, or they were not fitted yet."""
    casts_draft: bool = False
    """Whether rules cast tensors of a draft head, which no open model has."""
    has_cache_formats: bool = False
    """Whether the recipe gives KV caches a format."""
    cache_scheme: dict[str, Any] | None = None
    """compressed-tensors' `kv_cache_scheme`, if the export has scales of KV caches."""

    def __repr__(self) -> str:
        return f"Contents: {printable(self.title)}, {plural(len(self.items), 'tensor')}, {human_bytes(self.nbytes)}"

    @property
    def file_layout(self) -> FileLayout | None:
        """The layout of the weights with scales, or None for that of compressed-tensors or of this program."""
        return next((item.file_layout for item in self.items if item.file_layout is not None), None)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors, including scales but not the headers of the files."""
        return sum(item.nbytes for item in self.items)


def own_layout(items: Sequence[ExportTensor]) -> list[ExportTensor]:
    """Return the weights whose codes and scales are in a layout that only this program reads."""
    return [item for item in items if item.has_scales and not item.portable]
