"""Makes the tree of a model from both its module and the files of its weights. Plans, casts and exports use this tree.

Modules, classes and tied weights come from the module; dtypes and sizes come from the files. Tensors of the files that the module
does not use are included, since an export copies them. A tensor that the files lack counts as 0 bytes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core import dtypes
from dtype_engine.core.draft_heads import DraftHead, draft_head
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.results.coverage import Misshapen
from dtype_engine.runtime.model.module_tree import collect_tensors, tree_of
from dtype_engine.runtime.model.name_mapping import Placement, stored_dtypes
from dtype_engine.runtime.weights.checkpoint_weights import source_of

NOT_USED = "not used by"
"""The first words of `TensorInfo.uncastable_reason` for a tensor of the files that the module does not use."""
_EXPERTS = re.compile(r"\.(experts|switch_mlp)\..*")
"""Matches the end of a tensor's name from the module of the experts on: `.experts...` in transformers, `.switch_mlp...` in MLX."""


def stored_tree(
    module: nn.Module,
    checkpoint: Checkpoint,
    placements: Mapping[str, Placement],
    misshapen: Iterable[Misshapen] = (),
) -> Tree:
    """Return the tree of a module, which may be on the meta device, with the dtypes and sizes of a checkpoint. If the files hold a
    tied weight under two names with different values, the tree has two weights, like a model that transformers loads.

    placements: where each tensor of the files is loaded in the module. misshapen: the tensors whose shape in the files differs from
    that in the module; the tree has the shape in the files. Raises UserError if a file can't be read.
    """
    infos = _untied(collect_tensors(module)[0], checkpoint, placements)
    shapes = {
        placements[each.name].name: each.stored
        for each in misshapen
        if each.name in placements and not placements[each.name].part
    }
    infos = [dataclasses.replace(info, shape=shapes.get(info.name, info.shape)) for info in infos]
    headers = checkpoint.tree().tensors
    infos = without_quantised(with_files(infos, checkpoint, placements, headers, own_dtypes=False), headers)
    return tree_of(module, *with_unused(infos, checkpoint, placements, headers, type(module).__name__))


def with_files(
    infos: Iterable[TensorInfo],
    checkpoint: Checkpoint,
    placements: Mapping[str, Placement],
    headers: Mapping[str, TensorInfo],
    own_dtypes: bool,
) -> list[TensorInfo]:
    """Return the descriptions of a module's tensors (`infos`), updated with their sizes, packing and quantization in the files.

    headers: descriptions of the tensors of the files, keyed by name. own_dtypes: whether to keep the dtypes in `infos`, as for a
    loaded module, instead of those of the files.
    """
    stored = stored_dtypes(checkpoint, placements)
    sources: dict[str, list[str]] = {}
    for name, placement in placements.items():
        sources.setdefault(placement.name, []).append(name)
    described = []
    for info in infos:
        held = next((name for name in info.names if name in sources), None)
        if held is None:
            described.append(dataclasses.replace(info, made_on_load=info.persistent))
            continue
        files = [headers[name] for name in sources[held] if name in headers]
        dtype = info.dtype if own_dtypes else stored[held]
        codes = [checkpoint.coded[name] for name in sources[held] if name in checkpoint.coded]
        alone = files[0] if len(files) == 1 else info
        why_not = next((header.uncastable_reason for header in files if header.uncastable_reason), None)
        why_not = why_not or info.uncastable_reason
        computes = dtype in dtypes.COMPUTE_DTYPES
        if not why_not and not codes and computes and any(each.dtype not in dtypes.COMPUTE_DTYPES for each in files):
            why_not = f"stored as {files[0].dtype}, which is never cast"
        changed = dataclasses.replace(
            info,
            shape=alone.shape
            if alone.uncastable_reason
            else info.shape,  # the shape of a packed tensor is that of its words
            dtype=dtype,
            uncastable_reason=why_not,
            own_codes=info.own_codes or any(weight.own for weight in codes),
            logical_numel=alone.logical_numel,
            stored_as=() if set(sources[held]) <= set(info.names) else tuple(sources[held]),
        )
        if files and not changed.own_codes and (size := sum(header.nbytes for header in files)) != changed.nbytes:
            if not computes and not codes:  # packed codes that can't be decoded here can't be cast either
                why_not = why_not or f"stored as {dtype} in another shape, so as packed codes"
            # The parts have several dtypes, or a byte holds several values.
            changed = dataclasses.replace(changed, packed_bytes=size, uncastable_reason=why_not)
        described.append(changed)
    return described


def with_unused(
    infos: list[TensorInfo],
    checkpoint: Checkpoint,
    placements: Mapping[str, Placement],
    headers: Mapping[str, TensorInfo],
    title: str,
) -> tuple[list[TensorInfo], DraftHead]:
    """Return (`infos` and descriptions of the tensors of the files that the module does not use, the draft head among these). The
    tensors of the head are cast like those of the module, since a runtime uses them. All others are never cast.

    infos: descriptions of the module's tensors. headers: descriptions of all tensors of the files, keyed by name. title: the name
    of the module's class, for the reason why tensors are not cast.
    """
    taken = {name for info in infos for name in info.names}
    unused = [header for name, header in headers.items() if name not in placements and name not in taken]
    draft = draft_head((header.name for header in unused), checkpoint.config)
    why = f"{NOT_USED} {title}: it stays as it is stored"
    unused = [
        header
        if draft.holds(header.name)
        else dataclasses.replace(header, uncastable_reason=header.uncastable_reason or why)
        for header in unused
    ]
    return [*infos, *unused], draft


def _untied(infos: list[TensorInfo], checkpoint: Checkpoint, placements: Mapping[str, Placement]) -> list[TensorInfo]:
    """Return the descriptions of a module's tensors (`infos`). If the files hold different values for the names of a tied weight,
    the weight becomes separate tensors, as in transformers.
    """
    untied = []
    for info in infos:
        if not info.aliases:
            untied.append(info)
            continue
        held = {each.name: name for name, each in placements.items() if each.name in info.names}
        first = next(iter(held.values()), None)
        apart = [live for live, name in held.items() if first is not None and not same_values(checkpoint, first, name)]
        if not apart:
            untied.append(info)
            continue
        tied = [name for name in info.names if name not in apart]
        untied.append(dataclasses.replace(info, name=tied[0], aliases=tuple(tied[1:])))
        untied += [dataclasses.replace(info, name=name, aliases=()) for name in apart]
    return untied


def same_values(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Return whether two tensors of the files have the same dtype, shape and bits. Raises UserError if a file can't be read."""
    if checkpoint.aliases.get(one, one) == checkpoint.aliases.get(other, other):
        return True
    first, second = checkpoint.weights[one], checkpoint.weights[other]
    if (checkpoint.dtype(one), first.shape) != (checkpoint.dtype(other), second.shape) or first.packed:
        return False
    left, right = (source_of(checkpoint, name).read().contiguous().reshape(-1) for name in (one, other))
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def without_quantised(infos: list[TensorInfo], headers: Mapping[str, TensorInfo]) -> list[TensorInfo]:
    """Return the descriptions of a module's tensors (`infos`) without those that the files store as codes and scales under other
    names, in the same module or in the same group of experts. headers: descriptions of all tensors of the files, keyed by name.
    """
    parts = {name.rpartition(".")[0] for name, header in headers.items() if header.uncastable_reason}
    of_experts = {_EXPERTS.sub("", module) for module in parts if _EXPERTS.search(module)}
    return [
        info
        for info in infos
        if not info.made_on_load
        or not (parts & {info.name, info.name.rpartition(".")[0]} or _EXPERTS.sub("", info.name) in of_experts)
    ]
