"""Notices to the user about an export: weights that other programs do not read, tensors that no rule can cast, and tied weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized

from dtype_engine.core.dtypes import COMPUTE_DTYPES, widest
from dtype_engine.core.fused import split_groups
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree
from dtype_engine.recipe.loader_facts import loaded_dtype
from dtype_engine.runtime.export.contents import ExportTensor
from dtype_engine.runtime.export.readers import own_layout
from dtype_engine.runtime.model.name_mapping import Placement


def layout_notice(items: Sequence[ExportTensor]) -> tuple[str, ...]:
    """Return a sentence for the user about the weights with scales that only this program can read, or () if there are none."""
    if not (own := own_layout(items)):
        return ()
    first = printable(own[0].name)
    count = f"{first} is" if len(own) == 1 else f"{len(own)} weights, first {first}, are"
    return (
        f"{count} stored with scales in a layout that only dtype-engine reads, so from_pretrained of transformers raises an error: "
        "other programs read scales only for untied weights of linear layers, in float8_e4m3fn, int8, and blocks that divide their "
        "rows",
    )


def uncast_notices(items: Sequence[ExportTensor], tree: Tree, placements: Mapping[str, Placement]) -> tuple[str, ...]:
    """Return notices about the tensors that keep their stored dtype because no rule can cast them, and why. placements: for each
    tensor of the files, the model's tensor into which it is loaded.
    """
    unplaced, fixed = [], []
    for item in items:
        placement = placements.get(item.name)
        info = tree.canonical(placement.name) if placement is not None else None
        if info is None:
            unplaced.append(item.name)
        elif not info.castable:
            fixed.append((item.name, info.why_not_cast))
    notices = []
    if unplaced:
        notices.append(
            f"kept as stored, since the model has no place for them: {_tensors(unplaced)}, first {printable(unplaced[0])}"
        )
    if fixed:
        name, why = fixed[0]
        notices.append(f"kept as stored, whatever the rules say: {_tensors(fixed)}, first {printable(name)}: {why}")
    return tuple(notices)


def unwritten_notice(tree: Tree, planned: Mapping[str, str]) -> tuple[str, ...]:
    """Return a notice for the user about tensors that the rules cast and no file holds, or (). These are non-persistent buffers,
    which a model computes when it is made. planned: the dtype of each of the model's tensors.
    """
    names = [
        name
        for name, tensor in tree.tensors.items()
        if not tensor.persistent and planned.get(name, tensor.dtype) != tensor.dtype
    ]
    if not names:
        return ()
    return (
        f"not written: {_tensors(names)} that a rule casts, first {printable(names[0])}: no file holds it, since the model "
        "computes it when it is made, so whoever loads the export has it uncast",
    )


def kept_wide_notice(tree: Tree, items: Sequence[ExportTensor], placements: Mapping[str, Placement]) -> tuple[str, ...]:
    """Return a notice for the user about tensors in 16 bits that transformers widens to float32 when it loads the export, because
    the model's code requires it, or (). placements: for each tensor of the files, the model's tensor into which it is loaded.
    """
    wide = widest(item.dtype for item in items)
    names = []
    for item in items:
        placement = placements.get(item.name)
        info = tree.canonical(placement.name) if placement is not None else None
        if info is not None and item.dtype in COMPUTE_DTYPES and loaded_dtype(tree, info, wide) != wide:
            names.append(item.name)
    if not names:
        return ()
    return (
        f"from_pretrained of transformers computes {_tensors(names)} in float32, first {printable(names[0])}, as the model's code "
        "requires, so its outputs differ a little from what was measured",
    )


def _tensors(names: Sized) -> str:
    return "1 tensor" if len(names) == 1 else f"{len(names)} tensors"


def tied_notice(tied: Mapping[str, str]) -> tuple[str, ...]:
    """Return a notice that each tied weight is written under one name only, and that its other names are in the files' metadata.
    tied: maps each of the other names to the name that is written.
    """
    if not tied:
        return ()
    name, first = next(iter(tied.items()))
    count = "1 further name of a tied weight is" if len(tied) == 1 else f"{len(tied)} further names of tied weights are"
    return (
        f"{count} not written again, first {printable(name)}, which is {printable(first)}: the file's metadata has both names, as "
        "save_model of safetensors writes them, and load_model puts the weight in both places of a module that ties them",
    )


def split_notice(items: Sequence[ExportTensor]) -> tuple[str, ...]:
    """Return a sentence for the user if vLLM and SGLang will refuse the export because weights that they fuse, such as query, key
    and value, have different formats. Otherwise, return ().
    """
    planned = {item.name: item.dtype for item in items}
    groups = split_groups(planned)
    if not groups:
        return ()
    module = groups[0][0].removesuffix(".weight").rpartition(".")[0]
    first = ", ".join(f"{member.removesuffix('.weight').rpartition('.')[2]} {planned[member]}" for member in groups[0])
    count, have = ("1 group", "has") if len(groups) == 1 else (f"{len(groups)} groups", "have")
    return (
        f"vLLM and SGLang will refuse this export: {count} of weights that they fuse {have} several formats, first "
        f"{printable(module)}: {first}",
    )
