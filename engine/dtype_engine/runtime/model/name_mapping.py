"""Which tensor of a live module each tensor of a checkpoint becomes.

Mostly they have the same name. transformers also adds or drops the prefix of the base model, renames, and packs several
tensors of a file into one parameter (the experts of a layer).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core import dtypes
from dtype_engine.runtime.model.hf_private import converted_names
from dtype_engine.runtime.numerics.quantize import dtype_name as name_of
from dtype_engine.runtime.numerics.quantize import torch_dtype


@dataclass(frozen=True, slots=True)
class Placement:
    """The live tensor that a stored one becomes: its name there, and whether it is only a part of it.

    place: where the part lies, (the index of its matrix along the first dimension, or None where all is one matrix; its place
    among the parts below each other in that matrix). None where that is not known, since parts are turned or mixed, say.
    """

    name: str
    part: bool
    place: tuple[int | None, int] | None = None


def map_names(module: nn.Module, names: Iterable[str]) -> dict[str, Placement]:
    """Where each stored tensor goes in `module` (which may be on the meta device). Those that it has no place for are
    left out.
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


def restorable(checkpoint: Checkpoint, placements: Mapping[str, Placement]) -> dict[str, Placement]:
    """The weights whose stored dtype a loader is to keep: those that can be cast, and those stored with scales by an export.

    Integers, and what other programs quantised, are left to transformers.
    """
    return {
        name: placement
        for name, placement in placements.items()
        if name in checkpoint.quantized or checkpoint.dtype(name) in dtypes.COMPUTE_DTYPES
    }


def stored_dtypes(checkpoint: Checkpoint, placements: Mapping[str, Placement]) -> dict[str, str]:
    """The dtype in which each live tensor is stored, by live name; for packed ones the widest of their parts."""
    by_live_name: dict[str, str] = {}
    for name, placement in placements.items():
        stored = checkpoint.dtype(name)
        before = by_live_name.get(placement.name)
        if before is None or before == stored or not {before, stored} <= set(dtypes.COMPUTE_DTYPES):
            by_live_name[placement.name] = stored
        else:
            by_live_name[placement.name] = name_of(torch.promote_types(torch_dtype(before), torch_dtype(stored)))
    return by_live_name
