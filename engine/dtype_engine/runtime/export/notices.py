"""Notices to the user about an export: weights that other programs do not read, tensors that no rule can cast, and tied weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set, Sized

from dtype_engine.core.draft_heads import NOT_RUN, WORDS
from dtype_engine.core.dtypes import COMPUTE_DTYPES, has_rounding, short_name, unrounded, widest
from dtype_engine.core.fused import split_groups
from dtype_engine.core.text import printable
from dtype_engine.core.tree import TensorInfo, Tree, ancestors
from dtype_engine.recipe.loader_facts import loaded_dtype
from dtype_engine.recipe.presets import covering
from dtype_engine.runtime.export.contents import ExportTensor, own_layout


def layout_notice(items: Sequence[ExportTensor]) -> tuple[str, ...]:
    """Return a notice about the weights with scales that only this program can read."""
    if not (own := own_layout(items)):
        return ()
    first = printable(own[0].name)
    count = f"{first} is" if len(own) == 1 else f"{len(own)} weights, first {first}, are"
    so = "" if all(item.of_draft for item in own) else ", so from_pretrained of transformers raises an error"
    return (
        f"{count} stored with scales in a layout that only dtype-engine reads{so}: other programs read scales only for untied "
        "weights of linear layers, in float8_e4m3fn, int8, and blocks that divide their rows",
    )


def uncast_notices(items: Sequence[ExportTensor], infos: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    """Return notices about the tensors that no rule can cast. infos: the model's tensors by their names in the files."""
    unplaced = [item.name for item in items if item.name not in infos]
    fixed = [item.name for item in items if item.name in infos and not infos[item.name].castable]
    notices = []
    if unplaced:
        notices.append(
            f"kept as stored, since the model has no place for them: {_tensors(unplaced)}, first {printable(unplaced[0])}"
        )
    if fixed:
        why = infos[fixed[0]].why_not_cast
        notices.append(f"kept as stored, whatever the rules say: {_tensors(fixed)}, first {printable(fixed[0])}: {why}")
    return tuple(notices)


def draft_notices(tree: Tree, planned: Mapping[str, str]) -> tuple[str, ...]:
    """Return notices about the draft head of a model: that an export has it, and what rules do to it without a measurement.
    planned: the dtypes by the tensors' names in the model, with roundings.
    """
    if not tree.of_draft:
        return ()
    cast = [name for name, tensor in tree.of_draft.items() if planned[name] != tensor.dtype]
    head = f"{WORDS} in {printable(tree.draft.modules[0])}"
    if not cast:
        return (f"{head}: its {_tensors(tree.of_draft)} are written as stored",)
    formats = ", ".join(map(short_name, dict.fromkeys(unrounded(planned[name]) for name in cast)))
    said = [
        f"{head}: rules cast {len(cast)} of its {_tensors(tree.of_draft)} to {formats}, and {NOT_RUN}: no drift covers this"
    ]
    if rounded := [name for name in cast if has_rounding(planned[name])]:
        said.append(
            f"{_tensors(rounded)} of the draft head, first {printable(rounded[0])}, have the nearest values: no calibration run "
            "uses them"
        )
    return tuple(said)


def unwritten_notice(tree: Tree, planned: Mapping[str, str]) -> tuple[str, ...]:
    """Return a notice about non-persistent buffers that the rules cast, because no file holds them. planned: dtypes by name."""
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


def kept_wide_notice(
    tree: Tree, items: Sequence[ExportTensor], infos: Mapping[str, TensorInfo], of_diffusers: bool
) -> tuple[str, ...]:
    """Return a notice about 16-bit tensors that the loader widens to float32, because the model's code requires it. items: the
    tensors of one model. infos: the model's tensors by their names in the files. of_diffusers: True if diffusers loads the model,
    in the dtype that the user passes; False if transformers loads it, in the widest dtype of `items`.
    """
    wide = widest(item.dtype for item in items)
    names = []
    for item in items:
        if item.dtype in COMPUTE_DTYPES and item.name in infos:
            loaded = item.dtype if of_diffusers else wide
            if loaded_dtype(tree, infos[item.name], loaded, of_diffusers) != loaded:
                names.append(item.name)
    if not names:
        return ()
    loader, more = "transformers", ""
    if of_diffusers:
        rules = ", ".join(
            printable(f"{pattern}=f32") for pattern in _patterns(tree, {infos[name].name for name in names})
        )
        loader, more = "diffusers", f"; with {rules} as the last rules they do not"
    return (
        f"from_pretrained of {loader} computes {_tensors(names)} in float32, first {printable(names[0])}, as the model's code "
        f"requires, so its outputs differ a little from what was measured{more}",
    )


def _patterns(tree: Tree, names: Set[str]) -> list[str]:
    """Return patterns for the tensors `names`. A module whose tensors are all among them gets one pattern for the whole module."""
    whole = {module for module in tree.modules if module and {each.name for each in tree.below(module)} <= names}
    inside = (next((each for each in ancestors(name) if each in whole), name) for name in sorted(names))
    return covering(tree, dict.fromkeys(inside))


def passed_dtype(tree: Tree, items: Sequence[ExportTensor], infos: Mapping[str, TensorInfo]) -> str:
    """Return the dtype with which diffusers' `from_pretrained` loads every weight of a model in its dtype of the export, or "" if
    there is none. It is the dtype of all weights except those that the model's code keeps in float32.
    """
    computed = {item.name: item.dtype for item in items if item.dtype in COMPUTE_DTYPES and item.name in infos}
    narrow = set(computed.values()) - {"float32"}
    if len(narrow) != 1 or "float32" not in computed.values():
        return ""
    dtype = narrow.pop()
    loaded = {name: loaded_dtype(tree, infos[name], dtype, of_diffusers=True) for name in computed}
    return dtype if loaded == computed else ""


def _tensors(names: Sized) -> str:
    return "1 tensor" if len(names) == 1 else f"{len(names)} tensors"


def tied_notice(tied: Mapping[str, str]) -> tuple[str, ...]:
    """Return a notice that each tied weight is written under one name. tied: maps each omitted name to the written one."""
    if not tied:
        return ()
    name, first = next(iter(tied.items()))
    count = "1 further name of a tied weight is" if len(tied) == 1 else f"{len(tied)} further names of tied weights are"
    return (
        f"{count} not written again, first {printable(name)}, which is {printable(first)}: the file's metadata has both names, as "
        "save_model of safetensors writes them, and load_model puts the weight in both places of a module that ties them",
    )


def split_notice(items: Sequence[ExportTensor]) -> tuple[str, ...]:
    """Return a notice if weights that vLLM and SGLang fuse, such as query and key, have several formats, which they will refuse."""
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
