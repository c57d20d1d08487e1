"""Maps the tensors of a checkpoint to those of the module into which they are loaded.

Most tensors have the same name in the checkpoint and in the module. But transformers adds or drops the prefix of the base model,
renames tensors, and packs several tensors of a file, such as the experts of a layer, into one parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core import dtypes
from dtype_engine.runtime.formats.dequantize import dtype_name as name_of
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.libraries.hf_private import converted_names


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a tensor of a checkpoint is loaded."""

    name: str
    """The name of the tensor in the module."""
    part: bool
    """Whether loading packs this and other tensors of the checkpoint into one tensor of the module."""
    place: tuple[int | None, int] | None = None
    """The position in a tensor of the module that is packed from several, for example (3, 1): the index of the matrix along the
    first dimension, None if there is a single matrix, and the number of this tensor among those stacked in the rows of this matrix.
    The position is None if the tensors are not stacked, for example because they are transposed.
    """


def map_names(module: nn.Module, names: Iterable[str]) -> dict[str, Placement]:
    """Return where each tensor of a checkpoint is loaded in `module`, keyed by its name in the checkpoint (`names`). Tensors that
    the module lacks are omitted.
    """
    live = module.state_dict()
    placements: dict[str, Placement] = {}
    rest: list[str] = []
    prefix = str(getattr(module, "base_model_prefix", "") or "")
    for name in names:
        spellings = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}") if prefix else (name,)
        same = next((spelling for spelling in spellings if spelling in live), None)
        if same is not None:
            placements[name] = Placement(same, False)
        else:
            rest.append(name)
    if rest:
        placements |= {name: Placement(*converted) for name, converted in converted_names(module, rest, live).items()}
    return placements


def without_place(checkpoint: Checkpoint, placements: Mapping[str, Placement]) -> list[str]:
    """Return the names of the weights of a GGUF file that the module lacks; [] for other files. Other files may have tensors that
    no module needs, but llama.cpp's converter to GGUF writes no such tensors.
    """
    if checkpoint.form != "gguf" or checkpoint.config is None:
        return []
    return [name for name, each in checkpoint.weights.items() if name not in placements and each.refusal is None]


def stored_dtypes(checkpoint: Checkpoint, placements: Mapping[str, Placement]) -> dict[str, str]:
    """Return the stored dtype of each tensor of the module that the checkpoint has, keyed by its name in the module. A tensor that
    is packed from several parts gets the widest dtype of the parts or, if any part is stored as codes, the format of the first such
    part.
    """
    by_live_name: dict[str, str] = {}
    formats = {weight.format for weight in checkpoint.coded.values()}
    for name, placement in placements.items():
        stored = checkpoint.dtype(name)
        before = by_live_name.get(placement.name)
        if before in formats:
            continue
        if before is None or before == stored or not {before, stored} <= set(dtypes.COMPUTE_DTYPES):
            by_live_name[placement.name] = stored
        else:
            by_live_name[placement.name] = name_of(torch.promote_types(torch_dtype(before), torch_dtype(stored)))
    return by_live_name
