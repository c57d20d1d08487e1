"""Reads the tensors of a source checkpoint with loaders of other packages: torch.load, safetensors' safe_open, gguf's reader.
Exports are compared with these values, so a mistake in the exporter's reader, with which this file shares no code, is found.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dtype_engine.checkpoint.file_kind import kind_of
from dtype_engine.checkpoint.schemes import CodedWeight
from dtype_engine.core.errors import UserError, one_line
from dtype_engine.core.system_memory import free_memory
from dtype_engine.core.units import plural
from dtype_engine.runtime.weights.coded import CodedSource


@dataclass(frozen=True, slots=True)
class SourceValues:
    """The tensors of the source of an export. Each is read on use."""

    names: frozenset[str]
    read: Callable[[str], torch.Tensor]
    unchecked: tuple[str, ...] = ()
    """Sentences for the user about what can't be verified with these values."""


def of_files(files: tuple[Path, ...], wanted: frozenset[str], trust: bool, by_component: bool = False) -> SourceValues:
    """Open the files of a checkpoint for reading single tensors.

    wanted: the names of the weights, to find the mapping inside a pickle that holds them. trust: whether a pickle may run any code.
    by_component: True if names begin with the folder of their file, as in a diffusers pipeline. Raises UserError if a loader can't
    read its file.
    """
    try:
        if all(kind_of(file) == "safetensors" for file in files):
            return _of_safetensors(files, by_component)
        if all(kind_of(file) == "gguf" for file in files):
            return _of_gguf(files)
        return _of_pickles(files, wanted, trust)
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"the source can't be read to compare with it: {one_line(error, with_type=True)}") from None


def with_decoded(values: SourceValues, decoded: Mapping[str, CodedWeight], renamed: Mapping[str, str]) -> SourceValues:
    """Return the values of a source, in which each decoded weight replaces its stored tensors, such as codes and scales.

    decoded: the weights that another program quantized. renamed: the model's names of other tensors, keyed by their names in the
    files.
    """
    parts = {tensor.name for weight in decoded.values() for tensor in weight.tensors}
    own = {name: stored for stored, name in renamed.items()}

    def read(name: str) -> torch.Tensor:
        return CodedSource(decoded[name]).read() if name in decoded else values.read(own.get(name, name))

    caveat = (
        f"{plural(len(decoded), 'weight')} of another program were decoded by the same code here and for the export"
    )
    names = (values.names - parts - renamed.keys()) | decoded.keys() | own.keys()
    return SourceValues(names, read, (*values.unchecked, *([caveat] if decoded else ())))


def of_module(module: torch.nn.Module) -> SourceValues:
    """Return the current values of a module that the user's Python code has built."""
    state = {name: value.detach() for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    return SourceValues(
        frozenset(state),
        state.__getitem__,
        (
            "the source is code: its values were made again, and differ from the exported ones if the code draws them at random",
        ),
    )


def _of_safetensors(files: tuple[Path, ...], by_component: bool) -> SourceValues:
    opened: dict[str, Callable[[], torch.Tensor]] = {}
    for file in files:
        handle: Any = safe_open(file, framework="pt")
        for name in list(handle.keys()):
            opened[f"{file.parent.name}.{name}" if by_component else name] = partial(handle.get_tensor, name)
    return SourceValues(frozenset(opened), lambda name: opened[name]())


def _of_pickles(files: tuple[Path, ...], wanted: frozenset[str], trust: bool) -> SourceValues:
    state: dict[str, torch.Tensor] = {}
    for file in files:
        pickled = torch.load(file, map_location="cpu", weights_only=not trust, mmap=_mapped(file))
        state |= _entry(pickled, wanted)
    return SourceValues(frozenset(state), state.__getitem__)


def _mapped(file: Path) -> bool:
    if 2 * file.stat().st_size < free_memory() or not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return all(record.compress_type == zipfile.ZIP_STORED for record in archive.infolist())


def _entry(pickled: Any, wanted: frozenset[str]) -> dict[str, torch.Tensor]:
    """Return the mapping inside a pickle, at any depth, that contains most of the `wanted` tensor names."""
    if isinstance(pickled, torch.Tensor):
        return {"tensor": pickled.detach()}
    best: dict[str, torch.Tensor] = {}
    waiting = [pickled]
    while waiting:
        held = waiting.pop()
        if isinstance(held, torch.nn.Module):
            held = held.state_dict()
        if not isinstance(held, Mapping):
            continue
        tensors = {str(name): value.detach() for name, value in held.items() if isinstance(value, torch.Tensor)}
        if len(wanted & tensors.keys()) > len(wanted & best.keys()):
            best = tensors
        waiting += [value for value in held.values() if isinstance(value, (Mapping, torch.nn.Module))]
    return best


def _of_gguf(files: tuple[Path, ...]) -> SourceValues:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFReader
    from gguf.quants import dequantize

    tensors = {str(tensor.name): tensor for file in files for tensor in GGUFReader(file).tensors}
    plain = {"F64", "F32", "F16", "I8", "I16", "I32", "I64"}

    def read(name: str) -> torch.Tensor:
        tensor = tensors[name]
        kind = GGMLQuantizationType(tensor.tensor_type)
        values = np.array(tensor.data) if kind.name in plain else dequantize(np.array(tensor.data), kind)
        return torch.from_numpy(values).reshape([int(extent) for extent in reversed(tensor.shape.tolist())])

    blocks = any(tensor.tensor_type.name not in {*plain, "BF16"} for tensor in tensors.values())
    caveat = "the gguf package dequantized the blocks both here and for the export; they were not compared with another program"
    return SourceValues(frozenset(tensors), read, (caveat,) if blocks else ())
