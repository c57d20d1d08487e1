"""The contents of an exported checkpoint as plain data: its weights, their tensors in the files, and further files."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dtype_engine.checkpoint import ByteRange, FileIdentity
from dtype_engine.checkpoint.prequantized import codes_names, input_scale_name, parts_in
from dtype_engine.core import dtypes
from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe
from dtype_engine.results.coverage import Coverage
from dtype_engine.runtime.export.layout import PLAIN, Layout
from dtype_engine.runtime.formats.row_blocks import finite_amax

Quantized = tuple[torch.Tensor, ...]
"""The tensors of a weight with scales, in the order of its entries."""


class SharedScale:
    """The scale of several tensors that runtimes treat as one. The first call of `amax`, in any thread, reads all of them.

    names: the names of the tensors in the source. values: a function for each tensor that returns it.
    """

    def __init__(self, names: tuple[str, ...], values: Sequence[Callable[[], torch.Tensor]]) -> None:
        self.names = names
        self._values = values
        self._lock = threading.Lock()
        self._amax: float | None = None

    def amax(self) -> float:
        """The largest finite |value| of all these tensors."""
        with self._lock:
            if self._amax is None:
                self._amax = max(finite_amax(values()) for values in self._values)
            return self._amax


@dataclass(frozen=True, slots=True)
class InputScale:
    """The scale for the inputs of a layer."""

    value: float | None = None
    """None until the model has run on calibration inputs."""
    seen: bool = True
    """Whether any calibration input has reached this layer."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of an exported file."""

    name: str
    dtype: str
    """The dtype of torch."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtypes.BY_NAME[self.dtype].bits // 8


@dataclass(frozen=True, slots=True)
class ExportTensor:
    """One weight of the export."""

    name: str
    shape: tuple[int, ...]
    stored: str
    """The dtype in the source, with `@tensor` if it has that."""
    dtype: str
    """The dtype in the export, with `@tensor` if it has that."""
    has_scales: bool
    """Whether it is written with scales."""
    portable: bool
    """Whether it is written in a layout that other programs read."""
    source_bytes: tuple[ByteRange, ...]
    """The places of its data and then of its scales in the source's files if these bytes can be copied; otherwise empty."""
    values: Callable[[], torch.Tensor]
    """Returns the values that are cast to `dtype`."""
    quantized: Callable[[], Quantized] | None = None
    """Returns data and scales that exist already; None if the values have to be cast."""
    byte_range: ByteRange | None = None
    """The place of the values in a file, from which they are read instead of being mapped; None if no file has them in this
    form.
    """
    shared: SharedScale | None = None
    """The scale that it shares with fused siblings or with other parts of a packed weight; None if it has its own."""
    quantised_inputs: bool = False
    """Whether the configuration says to quantise the inputs of its layer."""
    input_scale: InputScale | None = None
    """The scale of these inputs, for formats that keep one in the file."""
    packed_into: str = ""
    """The weight of the live model into which loading packs this and other weights; "" if it is not packed."""

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """The tensors of this weight in the file: codes, then scales, further tensors of its format, and the scale of its inputs
        last. Scales are [channels, 1] for a matrix, [1] for one scale of the tensor, or [down, across] for blocks.
        """
        if not self.has_scales:
            return (TensorEntry(self.name, dtypes.BY_NAME[self.dtype].torch_name, self.shape),)
        theirs, own = codes_names(self.name, self.dtype)
        codes, *rest = parts_in(self.shape, self.dtype)
        found = [TensorEntry(theirs if self.portable else own, codes.dtype, codes.shape)]
        found += [TensorEntry(self.name + part.suffix, part.dtype, part.shape) for part in rest]
        if self.input_scale is not None:
            found.append(TensorEntry(input_scale_name(self.name), "float32", (1,)))
        return tuple(found)

    @property
    def nbytes(self) -> int:
        """The bytes of data and scales."""
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True)
class Contents:
    """Everything about an export except its folder."""

    title: str
    items: tuple[ExportTensor, ...]
    recipe: Recipe
    config: dict[str, Any] | None = None
    """The source's `config.json`."""
    folder: Path | None = None
    """The folder with the files that are copied."""
    linears: tuple[str, ...] = ()
    """The modules that compressed-tensors may quantize."""
    notices: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    """The files of the source."""
    layout: Layout = PLAIN
    """The folders and files of the export."""
    identities: tuple[FileIdentity, ...] = ()
    """The identities of `files` before anything was read from them."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Further names of tied weights in the source, each with the one name under which the weight is written."""
    settings: RunSettings = field(default_factory=RunSettings)
    """The settings in which the candidate was run. If its activations were quantised, the export says so."""
    coverage: Coverage | None = None
    """How many tensors of the model, or of the index, the source has; None where neither is known."""
    incomplete: tuple[str, ...] = ()
    """What the source lacks, a sentence each."""

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, with scales and without headers."""
        return sum(item.nbytes for item in self.items)
