"""Plans the dtype, name and size of every tensor of an export. Verifying an export makes the same plan again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.check.parts import unpaired_sentences
from dtype_engine.checkpoint.completeness import what_is_missing
from dtype_engine.checkpoint.gguf_model import unpacked_dtype
from dtype_engine.checkpoint.modeling_source import foreign_prefix
from dtype_engine.checkpoint.source import Source
from dtype_engine.checkpoint.weight_sets import is_diffusers
from dtype_engine.core import dtypes
from dtype_engine.core.block_formats import divides
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.core.text import printable
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe import Recipe, make_plan, require_matches
from dtype_engine.recipe.schemes import layout as named_layout
from dtype_engine.results.coverage import Coverage
from dtype_engine.runtime.building.describe import describe
from dtype_engine.runtime.export.coded import copies_of, decoded_notice, exported_config, layout_beside
from dtype_engine.runtime.export.contents import Contents, ExportTensor
from dtype_engine.runtime.export.experts import experts_notices
from dtype_engine.runtime.export.input_scales import activation_notices, with_quantised_inputs
from dtype_engine.runtime.export.layout import layout_of
from dtype_engine.runtime.export.notices import (
    draft_notices,
    kept_wide_notice,
    layout_notice,
    passed_dtype,
    split_notice,
    tied_notice,
    uncast_notices,
    unwritten_notice,
)
from dtype_engine.runtime.export.refusals import refuse_scales, refuse_unstored, refuse_unwritable
from dtype_engine.runtime.export.rounded import RoundedSource, unrounded, with_roundings
from dtype_engine.runtime.export.shared_scales import with_packed_scales, with_shared_scales
from dtype_engine.runtime.export.torchao_files import in_torchao_layout, loaded_dtypes, with_torchao_settings
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.model.name_mapping import Placement, map_names, without_place
from dtype_engine.runtime.model.stored_tree import same_values
from dtype_engine.runtime.weights.checkpoint_weights import source_of

_NONE: Mapping[str, float] = {}


def of_checkpoint(checkpoint: Checkpoint, title: str, recipe: Recipe, options: Options | None = None) -> Contents:
    """Return the planned contents of an export of a checkpoint under a recipe and the settings in `options`. Only file headers are
    read. If the architecture is known, the model is built without data to find module classes and tied weights. title: the name of
    the model, for reports and errors.

    Raises UserError for a rule that matches nothing, for a weight that can't be stored in its planned dtype, and if the weights are
    not on this machine.
    """
    checkpoint.need_values()
    if checkpoint.lost:
        raise UserError(
            f"{title}: {checkpoint.why_another_model}, so an export would be another model; export the checkpoint that it was made "
            "from"
        )
    options = options or Options()
    source = Source("checkpoint", title, checkpoint.path, trust_pickle=options.trust_pickle)
    known = describe(source, options, checkpoint)
    if not options.architecture and known.placements and (strange := without_place(checkpoint, known.placements)):
        raise UserError(
            f"{title}: the tensor {printable(strange[0])} has no place in {known.class_name}, so an export would be another model; "
            "export the checkpoint that it was made from"
        )
    require_matches(known.tree, recipe)
    plan = make_plan(known.tree, recipe)
    planned = unrounded(plan.dtypes)
    contents = _placed_contents(checkpoint, title, recipe, known.tree, known.placements, planned, options.settings)
    items = tuple(with_roundings(contents.items, _canonical(known.tree, known.placements), plan.dtypes))
    contents = dataclasses.replace(contents, items=items, has_cache_formats=bool(plan.caches))
    contents = _with_draft(contents, known.tree, plan.dtypes)
    return _with_coverage(contents, checkpoint, known.coverage, known.class_name)


def of_live(
    model: LiveModel,
    recipe: Recipe,
    planned: Mapping[str, str],
    settings: RunSettings,
    input_ranges: Mapping[str, float] = _NONE,
) -> Contents:
    """Return the planned contents of an export of an open model in its current dtypes (`planned`). The tensors are named as in the
    files of the model's checkpoint, or as in the module if the model comes from no checkpoint.

    input_ranges: the largest |value| of the inputs of each weight's layer, by the weight's name. Raises UserError for a weight that
    can't be stored in its dtype.
    """
    if model.checkpoint is not None:
        placements = map_names(model.module, model.checkpoint.weights)
        contents = _placed_contents(
            model.checkpoint, model.title, recipe, model.tree, placements, unrounded(planned), settings, input_ranges
        )
        source = RoundedSource(model, placements, {name: each.shape for name, each in model.checkpoint.weights.items()})
        items = with_roundings(contents.items, _canonical(model.tree, placements), planned, source)
        contents = _with_draft(dataclasses.replace(contents, items=tuple(items)), model.tree, planned)
        return _with_coverage(contents, model.checkpoint, model.coverage, type(model.module).__name__)
    tensors = []
    tied: dict[str, str] = {}
    for info in model.tree.tensors.values():
        if info.persistent:
            tied |= dict.fromkeys(info.aliases, info.name)
            weight, dtype = model.weights[info.name], dtypes.unrounded(planned[info.name])
            has_scales = dtype in dtypes.STORAGE_DTYPES and dtype != info.dtype
            tensors.append(
                ExportTensor(
                    info.name, info.shape, info.dtype, dtype, has_scales, False, (), weight.stored,
                )
            )  # fmt: skip
    canonical = {item.name: item.name for item in tensors}
    items = with_shared_scales(tensors, canonical)
    items = with_roundings(items, canonical, planned, RoundedSource(model, {}, {}))
    refuse_unstored(items)
    notices = (*layout_notice(items), *split_notice(items), *activation_notices(items, settings), *tied_notice(tied))
    return Contents(
        model.title, _checked(items), recipe, notices=notices, files=model.files, identities=model.identities, tied=tied,
        settings=settings,
    )  # fmt: skip


def _canonical(tree: Tree, placements: Mapping[str, Placement]) -> dict[str, str]:
    """Return the name that each tensor of the files, or the weight into which it is packed, has in the model's tree."""
    found = {name: tree.canonical(placement.name) for name, placement in placements.items()}
    return {name: info.name for name, info in found.items() if info is not None}


def _with_draft(contents: Contents, tree: Tree, planned: Mapping[str, str]) -> Contents:
    """Return `contents` with what is said of a draft head. planned: the dtypes by the names in the model, with roundings."""
    cast = any(planned[name] != tensor.dtype for name, tensor in tree.of_draft.items())
    return dataclasses.replace(contents, notices=(*contents.notices, *draft_notices(tree, planned)), casts_draft=cast)


def _with_coverage(contents: Contents, checkpoint: Checkpoint, coverage: Coverage | None, class_name: str) -> Contents:
    """Return `contents` with its `coverage`, and with sentences on what the checkpoint lacks: tensors that its index lists, tensors
    that a quantized weight needs, or tensors of the model. Any other problem of the index becomes a notice. coverage: how many of
    the model's tensors the checkpoint has; if None, the result gets the coverage of the index. class_name: the model class, for the
    sentences.
    """
    index, prefix = checkpoint.index, foreign_prefix(checkpoint.weights, checkpoint.config)
    incomplete = (
        *what_is_missing(index, coverage, class_name, prefix),
        *unpaired_sentences(checkpoint.foreign),
    )
    of_index = () if index is None else (each for each in index.sentences if each not in incomplete)
    if coverage is None and index is not None:
        coverage = index.coverage
    notices = (*contents.notices, *of_index)
    return dataclasses.replace(contents, coverage=coverage, incomplete=incomplete, notices=notices)


def _placed_contents(
    checkpoint: Checkpoint,
    title: str,
    recipe: Recipe,
    tree: Tree,
    placements: Mapping[str, Placement],
    planned: Mapping[str, str],
    settings: RunSettings,
    input_ranges: Mapping[str, float] = _NONE,
) -> Contents:
    """Return the planned contents of an export of a checkpoint. Each tensor of the files gets the planned dtype of the model's
    tensor into which it is loaded (`placements`), or keeps its stored dtype if the model does not use it. Raises UserError if the
    export could not be written or loaded.
    """
    placements = {**placements, **{name: Placement(name, False) for name in tree.of_draft}}
    infos = {name: info for name, each in placements.items() if (info := tree.canonical(each.name)) is not None}
    of_files = _planned_in_files(checkpoint, infos, placements, planned)
    config, decoded = exported_config(checkpoint, of_files)
    items, of_experts, tied = _items_of_files(checkpoint, tree, infos, placements, of_files)
    linears = [name for name, node in tree.modules.items() if node.class_name == "Linear"]
    items = [dataclasses.replace(item, of_draft=item.name in tree.of_draft) for item in items] if tree.draft else items
    items = with_packed_scales(items, infos, placements)
    items = with_shared_scales(items, {name: info.name for name, info in infos.items() if not placements[name].part})
    items = with_quantised_inputs(items, settings, input_ranges, checkpoint)
    folder = checkpoint.folder if checkpoint.path.is_dir() or checkpoint.config is not None else None
    files = (checkpoint.path, *checkpoint.files)
    layout = layout_of(checkpoint)
    loaded, loaders = loaded_dtypes(layout, items, tree, infos), _loaders(checkpoint)
    items = in_torchao_layout(items, loaded, loaders, tree, infos)
    refuse_unstored(items)
    refuse_scales(layout, items, linears)
    refuse_unwritable(checkpoint, items)
    otherwise = unwritten_notice(tree, planned)
    for prefix, of_diffusers in loaders:
        of_model = [item for item in items if item.name.startswith(prefix)]
        otherwise += kept_wide_notice(tree, of_model, infos, of_diffusers)
    notices = (
        *(checkpoint.notices if checkpoint.form == "pickle" or checkpoint.merged is not None else checkpoint.of_sets),
        *layout_notice(items),
        *split_notice(items),
        *experts_notices(items),
        *activation_notices(items, settings),
        *decoded_notice(decoded, items),
        *(uncast_notices(items, infos) if recipe.rules else ()),
        *otherwise,
        # A known architecture ties these weights when it is loaded.
        *(tied_notice(tied) if checkpoint.config is None else ()),
        *layout.notices,
    )
    layout = layout_beside(layout, checkpoint, items)
    layout = with_torchao_settings(layout, checkpoint, config, items, linears, loaded)
    return Contents(
        title, _checked(items), recipe, config, folder, (*linears, *of_experts), notices, files, layout,
        checkpoint.identities, tied, settings, otherwise=otherwise,
        passed=passed_dtype(tree, items, infos) if layout.kind == "component" else "",
    )  # fmt: skip


def _loaders(checkpoint: Checkpoint) -> list[tuple[str, bool]]:
    """Return, for each model in a checkpoint, (the prefix of its tensors, True if diffusers or False if transformers loads it)."""
    if checkpoint.form == "diffusers":
        return [(component.prefix, is_diffusers(component.config)) for component in checkpoint.components]
    of_diffusers = is_diffusers(checkpoint.config)
    return [("", of_diffusers)] if of_diffusers or checkpoint.of_transformers else []


def _items_of_files(
    checkpoint: Checkpoint,
    tree: Tree,
    infos: Mapping[str, TensorInfo],
    placements: Mapping[str, Placement],
    of_files: Mapping[str, str],
) -> tuple[list[ExportTensor], list[str], dict[str, str]]:
    """Return (the tensors to write, the names of linear layers, a map of each omitted name of a tied weight to its written name).
    The layers are those whose weights loading packs into one weight, such as experts. infos: the model's tensor for each tensor of
    the files, by its name in the files.
    """
    items, of_experts = list[ExportTensor](), list[str]()
    written: dict[str, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in checkpoint.weights.items():
        dtype, placement, info = of_files[name], placements.get(name), infos.get(name)
        part = placement is not None and placement.part
        if info is not None and info.aliases and not part and name != "format":
            first = written.setdefault(info.name, name)
            if first != name and same_values(checkpoint, first, name):
                tied[name] = first  # a tied weight is written once, even if its file holds it twice
                continue
        is_layer = info is not None and _is_layer(tree, info, name, tensor.shape, placement)
        items.append(_item(checkpoint, name, dtype, is_layer and _expressible(tensor.shape, dtype)))
        if is_layer and part:
            of_experts.append(name.removesuffix(".weight"))
    return items, of_experts, tied


def _planned_in_files(
    checkpoint: Checkpoint,
    infos: Mapping[str, TensorInfo],
    placements: Mapping[str, Placement],
    planned: Mapping[str, str],
) -> dict[str, str]:
    """Return the planned dtype of each weight by its name in the files. infos: the model's tensor for each tensor of the files.
    placements: where each tensor of the files is loaded. planned: the dtypes by the tensors' names in the model.
    """
    found = {}
    for name in checkpoint.weights:
        found[name] = stored = checkpoint.dtype(name)
        if (info := infos.get(name)) is not None and info.castable:
            dtype = planned[info.name]
            # If no rule changes the dtype of the live tensor, each part that is packed into it keeps its stored dtype.
            found[name] = stored if placements[name].part and dtype == info.dtype else dtype
        if found[name] == stored and name in checkpoint.coded:
            found[name] = checkpoint.coded[name].values_as or unpacked_dtype(checkpoint.coded[name]) or stored
    return found


def _item(checkpoint: Checkpoint, name: str, dtype: str, expressible: bool) -> ExportTensor:
    """Return a tensor to write. expressible: whether other programs can read this tensor if it is stored with scales."""
    tensor, stored, coded = checkpoint.weights[name], checkpoint.dtype(name), checkpoint.coded.get(name)
    has_scales = (coded is not None and coded.own) or (dtype in dtypes.STORAGE_DTYPES and dtype != stored)
    of_others = coded if coded is not None and not coded.own else None
    copies = copies_of(checkpoint, of_others) if of_others is not None and dtype == stored else ()
    own_parts = (tensor,) if coded is None else tuple(coded.parts.values())
    ranges = [part.bytes for part in (own_parts if of_others is None else copies)]
    source_bytes = tuple(each for each in ranges if each is not None) if dtype == stored and None not in ranges else ()
    source, portable = source_of(checkpoint, name, "copied"), has_scales and expressible
    return ExportTensor(
        name, tensor.shape, stored, dtype, has_scales, portable, source_bytes, source, coded=of_others, copies=copies
    )


def _is_layer(tree: Tree, info: TensorInfo, name: str, shape: tuple[int, ...], placement: Placement | None) -> bool:
    """Return whether other programs load the tensor `name` of the files as the weight of a linear layer. Either it is the weight
    of an `nn.Linear` and has the same name in the model (`info`), or loading packs it into the weight of an `nn.Linear` or of a
    layer's experts.
    """
    if info.aliases or len(shape) != 2 or not name.endswith(".weight"):
        return False
    kind = tree.modules[info.name.rpartition(".")[0]].class_name or ""
    if placement is not None and placement.part:
        return placement.place is not None and ("expert" in kind.lower() if len(info.shape) == 3 else kind == "Linear")
    return info.name == name and kind == "Linear"


def _expressible(shape: tuple[int, ...], dtype: str) -> bool:
    """Return whether other programs can read a linear layer's weight in this dtype: no row may end in an incomplete block."""
    if dtype not in dtypes.BY_NAME or not named_layout(dtype):
        return False
    blocks = dtypes.BY_NAME[dtype].blocks
    return blocks is None or blocks.rows > 1 or divides(shape, blocks)


def _checked(items: list[ExportTensor]) -> tuple[ExportTensor, ...]:
    """Return `items` as a tuple. Raises UserError if there are no items, or if two tensors would have the same name in the file."""
    if not items:
        raise UserError("there are no tensors to export")
    seen: set[str] = set()
    for item in items:
        for entry in item.entries:
            if entry.name in seen:
                raise UserError(f"two tensors of the export would both be named {printable(entry.name)}")
            seen.add(entry.name)
    return tuple(items)
