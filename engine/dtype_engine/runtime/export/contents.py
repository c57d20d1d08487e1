"""The contents of an exported checkpoint as plain data: its weights, the tensors that hold the weights in the files, and the files
without weights.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dtype_engine.checkpoint import ByteRange, CheckpointTensor, FileIdentity
from dtype_engine.checkpoint.prequantized import codes_names, input_scale_name, parts_in
from dtype_engine.checkpoint.schemes import EncodedWeight
from dtype_engine.core import dtypes
from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe
from dtype_engine.results.coverage import Coverage
from dtype_engine.runtime.export.layout import PLAIN, Layout
from dtype_engine.runtime.formats.row_blocks import finite_amax

Quantized = tuple[torch.Tensor, ...]
"""The tensors with which a file stores a weight that has scales: its codes, its scales and the format's other tensors, in the order
of the file.
"""


class SharedScale:
    """A single scale for several tensors, computed from the largest |value| of all of them.

    names: the names of the tensors in the source. values: one function for each tensor, which returns the tensor's values. The
    first call of `amax`, in any thread, calls all these functions. Later calls return the same result without calling them.
    """

    def __init__(self, names: tuple[str, ...], values: Sequence[Callable[[], torch.Tensor]]) -> None:
        self.names = names
        self._values = values
        self._lock = threading.Lock()
        self._amax: float | None = None

    def amax(self) -> float:
        """Return the largest finite |value| of all tensors that share the scale."""
        with self._lock:
            if self._amax is None:
                self._amax = max(finite_amax(values()) for values in self._values)
            return self._amax


@dataclass(frozen=True, slots=True)
class InputScale:
    """NVFP4's scale for quantizing the inputs of a layer, which the export stores."""

    value: float | None = None
    """The scale, or None until the model has run on calibration inputs."""
    seen: bool = True
    """Whether this layer was called in any calibration pass. A layer that was not called has the scale of similar layers."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of an exported file."""

    name: str
    dtype: str
    """The dtype of the tensor, as torch names it."""
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
    """The dtype in the source. It ends in `@tensor` if the source stores a single scale for the whole weight."""
    dtype: str
    """The dtype in the export. The name ends with `@tensor` if the export has a single scale for the whole weight."""
    has_scales: bool
    """Whether the export stores this weight as codes and scales."""
    portable: bool
    """Whether the export stores this weight in a layout that other programs read."""
    source_bytes: tuple[ByteRange, ...]
    """The byte ranges of data and scales in the source's files, if these bytes can be copied unchanged. The tuple is empty if the
    bytes can't be copied.
    """
    values: Callable[[], torch.Tensor]
    """A function that reads the source's values, which the export then casts to `dtype`."""
    quantized: Callable[[], Quantized] | None = None
    """A function that returns this weight's codes and scales, if they exist already and can be written unchanged. If this field is
    None, the export computes codes and scales from `values`.
    """
    byte_range: ByteRange | None = None
    """Where the source's file holds the values, if it holds them unchanged and contiguously: they are then read from there, without
    memory-mapping the file. Otherwise None.
    """
    shared: SharedScale | None = None
    """The scale that this weight shares with other weights: with those that runtimes fuse with it, or with those that loading packs
    into the same weight. None if it shares its scale with no other weight.
    """
    quantised_inputs: bool = False
    """Whether the exported configuration declares the inputs of this weight's layer as quantized."""
    input_scale: InputScale | None = None
    """The scale for quantizing this layer's inputs, or None if the format stores no such scale."""
    packed_into: str = ""
    """The weight of the live model into which loading packs this weight and others; "" if this weight is not packed."""

    encoded: EncodedWeight | None = None
    """How the source stores the weight, if another program quantized it, for example by GPTQ. None if the source stores plain
    values, or codes that an export of this program wrote.
    """

    copies: tuple[CheckpointTensor, ...] = ()
    """The source's tensors that the export copies unchanged, if another program quantized the weight. Empty if the weight is
    written in another format. Also empty if another item copies these tensors: if experts are stacked in one tensor, only the item
    of the first expert copies it.
    """

    @property
    def copied(self) -> bool:
        """Whether the export copies this weight as another program quantized it."""
        return self.encoded is not None and self.dtype == self.stored

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """The tensors that hold this weight in the file: codes, scales, further tensors of the format, and finally the scale of the
        inputs. Scales are [channels, 1] for a matrix, [1] for a single scale, or [blocks down, blocks across]. If the export copies
        the weight as another program quantized it, these are the tensors of that program (`copies`).
        """
        if self.copied:
            return tuple(TensorEntry(each.name, each.dtype, each.shape) for each in self.copies)
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
        """The number of bytes of all tensors that hold this weight in the file."""
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True)
class Contents:
    """Everything about an export except the folder to which it is written."""

    title: str
    items: tuple[ExportTensor, ...]
    recipe: Recipe
    config: dict[str, Any] | None = None
    """The source's `config.json`."""
    folder: Path | None = None
    """The source folder, from which files without weights are copied."""
    linears: tuple[str, ...] = ()
    """The names of the linear modules. The `quantization_config` must list those that stay unquantized."""
    notices: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    """The files from which the weights are read."""
    layout: Layout = PLAIN
    """The folders and files of the export."""
    identities: tuple[FileIdentity, ...] = ()
    """The size, modification time and inode of each of `files`, recorded before the file was read, to detect later changes."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Maps each omitted name of a tied weight to the name under which the weight is written."""
    settings: RunSettings = field(default_factory=RunSettings)
    """The settings with which the candidate runs. If they quantize activations, `config.json` requests this from runtimes, too."""
    coverage: Coverage | None = None
    """How many of the model's tensors the source has. If the model's tensors are unknown, those in the source's index are counted
    instead. None if there is no index either.
    """
    incomplete: tuple[str, ...] = ()
    """Sentences that name the tensors which the source lacks."""
    cache_scheme: dict[str, Any] | None = None
    """compressed-tensors' `kv_cache_scheme`, if the export has scales of KV caches; otherwise None."""

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors, with scales and without file headers."""
        return sum(item.nbytes for item in self.items)
