"""What an exported checkpoint holds, as plain data: its weights, their tensors in the files, and what goes along."""

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
    """The scale of tensors that are one for runtimes. `amax` reads all of them the first time that it is asked for, in any thread.

    names: those of the tensors, in the source. values: gives each of them.
    """

    def __init__(self, names: tuple[str, ...], values: Sequence[Callable[[], torch.Tensor]]) -> None:
        self.names = names
        self._values = values
        self._lock = threading.Lock()
        self._amax: float | None = None

    def amax(self) -> float:
        """The largest finite |value| of all members."""
        with self._lock:
            if self._amax is None:
                self._amax = max(finite_amax(values()) for values in self._values)
            return self._amax


@dataclass(frozen=True, slots=True)
class InputScale:
    """The scale for the inputs of a layer."""

    value: float | None = None
    """None until calibration inputs were run."""
    seen: bool = True
    """Whether this layer had any of these inputs."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of an exported file. `dtype` is torch's name."""

    name: str
    dtype: str
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
    """Its dtype before, `@tensor` included."""
    dtype: str
    """Its dtype after, `@tensor` included."""
    has_scales: bool
    """Whether it is written with scales."""
    portable: bool
    """Whether it is written as other programs have it, so that they read it."""
    source_bytes: tuple[ByteRange, ...]
    """Where its data and then its scales lie in the source's files, if nothing is cast and they can be copied."""
    values: Callable[[], torch.Tensor]
    """Gives what is cast to `dtype`."""
    quantized: Callable[[], Quantized] | None = None
    """Gives data and scales that exist already; None where the values are to be cast."""
    byte_range: ByteRange | None = None
    """Where the values lie in a file as torch has them, if they do: they are read from there rather than mapped."""
    shared: SharedScale | None = None
    """The scale that it shares with fused siblings, or with other parts of what loading packs; None where it has its own."""
    quantised_inputs: bool = False
    """Whether other programs are told to quantise the inputs of its layer."""
    input_scale: InputScale | None = None
    """The scale of these inputs, where a file has one."""
    packed_into: str = ""
    """The weight of the live model that loading packs it into, with others; "" where it is one by itself."""

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """Its tensors in the file: codes, then scales, what else its format has, and the scale of its inputs last. Scales of a
        matrix are [channels, 1], or [1] for one scale a tensor, or [down, across] of blocks.
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
        """Bytes of data and scales."""
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True)
class Contents:
    """Everything about an export but where it goes."""

    title: str
    items: tuple[ExportTensor, ...]
    recipe: Recipe
    config: dict[str, Any] | None = None
    """The source's `config.json`."""
    folder: Path | None = None
    """Has the files that go along."""
    linears: tuple[str, ...] = ()
    """The modules that compressed-tensors may quantize."""
    notices: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    """Those that are read."""
    layout: Layout = PLAIN
    """Which folders and files it is written to."""
    identities: tuple[FileIdentity, ...] = ()
    """What the files were before anything of them was read."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names of the source for the very tensor of another name, which is written once, under that other name."""
    settings: RunSettings = field(default_factory=RunSettings)
    """How the candidate was run; where its activations were quantised, the export says so."""
    coverage: Coverage | None = None
    """How many tensors of the model, or of the index, the source has; None where neither is known."""
    incomplete: tuple[str, ...] = ()
    """What the source lacks, a sentence each."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, scales included; headers are not counted."""
        return sum(item.nbytes for item in self.items)
