"""The values of a source by loaders that are not this program's: torch.load, safetensors' safe_open, gguf's reader.

An export is checked against these. Nothing here is shared with what the exporter reads by: a mistake there would otherwise be
made twice, and approved.
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
from dtype_engine.core.errors import UserError, one_line


@dataclass(frozen=True, slots=True)
class SourceValues:
    """Tensors by name, each read when it is used. unchecked: what these values can't prove, a sentence each."""

    names: frozenset[str]
    read: Callable[[str], torch.Tensor]
    unchecked: tuple[str, ...] = ()


def of_files(files: tuple[Path, ...], wanted: frozenset[str], trust: bool, by_component: bool = False) -> SourceValues:
    """The values in the files of a checkpoint. wanted: names that are looked for in a pickle's entries. by_component: names begin
    with the folder that their file is in, as those of a pipeline do.

    Raises UserError when a loader can't read its file.
    """
    try:
        if all(kind_of(file) == "safetensors" for file in files):
            return _of_safetensors(files, by_component)
        if all(kind_of(file) == "gguf" for file in files):
            return _of_gguf(files)
        return _of_pickles(files, wanted, trust)
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"the source can't be read to compare with it: {one_line(error, with_type=True)}") from None


def of_module(module: torch.nn.Module) -> SourceValues:
    """The values of a module that code made, as they are now."""
    state = {name: value.detach() for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    return SourceValues(
        frozenset(state),
        state.__getitem__,
        (
            "the source is code: its values were taken as it makes them now, which is not what it made then if it draws them anew",
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
    """Whether a file is too large to be read whole beside everything else, and can be mapped."""
    import psutil

    if 2 * file.stat().st_size < psutil.virtual_memory().available or not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return all(record.compress_type == zipfile.ZIP_STORED for record in archive.infolist())


def _entry(pickled: Any, wanted: frozenset[str]) -> dict[str, torch.Tensor]:
    """Of what a pickle holds, the mapping with the most of the names that are looked for."""
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
    caveat = "blocks were dequantized by the gguf package here, as they were for the export; no other program was asked"
    return SourceValues(frozenset(tensors), read, (caveat,) if blocks else ())
