"""Writes an export: decides the files of each folder, writes them, and puts the finished folder in its place."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from dtype_engine.checkpoint import refuse_changed, unchanged
from dtype_engine.checkpoint.export_folder import check_folder, is_one_file
from dtype_engine.checkpoint.schemes.own import SCALED_KEY, SHAPE_KEY
from dtype_engine.core import dtypes
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import UserError
from dtype_engine.core.export_lock import recover_stale
from dtype_engine.core.system_memory import trim_heap
from dtype_engine.core.user_folders import expanded
from dtype_engine.recipe.file import write_recipe
from dtype_engine.reports.text_losses import loss_notice
from dtype_engine.results.export import ExportReport
from dtype_engine.results.losses import ValueLoss
from dtype_engine.runtime.export.config import changed_configs, export_dtype
from dtype_engine.runtime.export.contents import Contents, ExportTensor
from dtype_engine.runtime.export.input_scales import refuse_uncalibrated
from dtype_engine.runtime.export.layout import Part
from dtype_engine.runtime.export.one_file import export_file
from dtype_engine.runtime.export.readme import by_dtype, readme
from dtype_engine.runtime.export.rounded import refuse_unfitted
from dtype_engine.runtime.export.staging import copy_sidecars, staged
from dtype_engine.runtime.export.torchao_files import torchao_metadata
from dtype_engine.runtime.export.write import OnBytes, Progress, copy_file, write_file

SHARD_SIZE = "5GB"
Files = dict[str, tuple[ExportTensor, ...]]


def export(
    contents: Contents,
    target: Path,
    max_shard_size: int | str = SHARD_SIZE,
    on_bytes: OnBytes = lambda done, total: None,
    cancelled: IsCancelled = never,
    force: bool = False,
    lost: Sequence[ValueLoss] | None = None,
    incomplete: bool = False,
) -> ExportReport:
    """Write an export to the path `target`, which gets its name only after everything is written. If the name ends in
    `.safetensors`, `.pth`, `.pt`, `.bin` or `.ckpt`, the export is one file of weights, and otherwise a folder. Each of up to four
    threads holds at most one tensor in memory, and for plain casts only a block of a tensor.

    max_shard_size: the maximum size of each weights file in a folder, in bytes or as in "5GB". on_bytes: called with the number of
    bytes written and the total. force: whether to replace an existing export, once everything is written; the source is never
    replaced. lost: the weights in which a cast makes values infinite or zero, or saturates them; if None, they are found while
    writing. incomplete: whether to export a source that lacks tensors of its model, or has some in other shapes. Raises Cancelled,
    and UserError if the source is incomplete and `incomplete` is False, the disk has too little space, the target exists, or the
    target can't hold a dtype. After an error, nothing is left on the disk.
    """
    if is_one_file(target):
        whole = partial(export, contents, max_shard_size=contents.nbytes + 1, cancelled=cancelled, lost=lost)
        write_folder = lambda folder, told: whole(folder, on_bytes=told, incomplete=incomplete)  # noqa: E731
        return export_file(contents, target, force, on_bytes, cancelled, write_folder)
    started = time.perf_counter()
    recover_stale(expanded(target).absolute())
    target = check_folder(target, force, contents.files)
    _refuse(contents, incomplete)
    configs = changed_configs(contents)
    files = shards(contents, max_shard_size)
    whole_bytes = contents.nbytes + sum(file.stat().st_size for file, _ in contents.layout.copied)
    progress = Progress(whole_bytes, on_bytes, cancelled, contents.identities)
    progress.wrote(0)
    sums = by_dtype(contents)
    # The source is checked once more before the folder gets its name.
    with staged(target, whole_bytes, force) as stage, unchanged(contents.identities):
        notices = (*contents.notices, *contents.incomplete, *_write_other_files(stage, contents, configs, progress))
        known = None if contents.casts_draft else lost  # an open model knows nothing of its draft head
        counted = _write_weights(stage, contents, files, progress, known is None)
        losses = counted if known is None else tuple(known)
        _write_recipe_of(contents, stage, losses)
        (stage / "README.md").write_text(readme(contents, target.name, sums, losses), encoding="utf-8")
        # If another program has changed the source meanwhile, the export mixes two models.
        refuse_changed(contents.identities)
    trim_heap()
    return ExportReport(
        folder=str(target),
        model=contents.title,
        rules=tuple(map(str, contents.recipe.rules)),
        config_dtype=export_dtype(contents),
        nbytes=contents.nbytes,
        files=names_of(files),
        dtypes=sums,
        seconds=time.perf_counter() - started,
        notices=notices + ((notice,) if (notice := loss_notice(losses)) else ()),
        lost=losses,
        coverage=contents.coverage,
    )


def _refuse(contents: Contents, incomplete: bool) -> None:
    """Raise UserError for contents that can't be written. incomplete: whether the source may lack tensors."""
    refuse_uncalibrated(contents)
    refuse_unfitted(contents)
    if incomplete or not contents.incomplete:
        return
    coverage = contents.coverage
    share = f"{coverage}: " if coverage is not None else ""
    is_whole = coverage is not None and coverage.misshapen and not coverage.missing
    problem = "does not fit its config.json" if is_whole else "is incomplete"
    raise UserError(
        f"{contents.title} {problem}: {share}{'; '.join(contents.incomplete)}; --incomplete (in Python: incomplete=True) "
        "exports what is there"
    )


def _write_other_files(
    stage: Path, contents: Contents, configs: Mapping[str, Any], progress: Progress
) -> tuple[str, ...]:
    """Make the folders of all parts in `stage`, and write `configs` and copies of other files. Returns notices."""
    notices, layout = tuple[str, ...](), contents.layout
    if layout.kind == "model" and contents.folder is not None and contents.config is not None:
        coded = [item for item in contents.items if item.coded is not None]
        notices = copy_sidecars(contents.folder, stage, bool(coded) and all(item.copied for item in coded))
    for part in layout.parts:
        (stage / part.folder).mkdir(parents=True, exist_ok=True)
    for file, path in layout.copied:
        (stage / path).parent.mkdir(parents=True, exist_ok=True)
        copy_file(file, stage / path, progress)
    for path, config in configs.items():
        (stage / path).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return notices


def _write_weights(
    stage: Path, contents: Contents, files: Mapping[Part, Files], progress: Progress, counting: bool
) -> tuple[ValueLoss, ...]:
    """Write the weights files of all parts into the folder `stage`, and an index for each part that has several files. If
    `counting`, returns the weights in which a cast makes values infinite or zero, or saturates them, in the order of `contents`.
    Otherwise, returns ().
    """
    counted: list[ValueLoss] = []
    for part, by_file in files.items():
        folder = stage / part.folder
        lossy: list[ValueLoss] | None = [] if counting else None
        described = torchao_metadata(part, [item for items in by_file.values() for item in items])
        for name, items in by_file.items():
            metadata = _metadata(part, items, contents.tied) | described
            write_file(folder / name, items, metadata, progress, lossy)
        counted += [dataclasses.replace(loss, tensor=part.prefix + loss.tensor) for loss in lossy or ()]
        if len(by_file) > 1:
            (folder / f"{part.stem}.safetensors.index.json").write_text(_index(by_file), encoding="utf-8")
    order = {item.name: index for index, item in enumerate(contents.items)}  # files are written in parallel
    return tuple(sorted(counted, key=lambda loss: order[loss.tensor]))


def _write_recipe_of(contents: Contents, stage: Path, losses: tuple[ValueLoss, ...]) -> None:
    settings = contents.settings if contents.settings.quantize_activations != "none" else None
    recipe = write_recipe(contents.recipe, contents.title, settings, lost=losses, fitted_to=contents.fitted_to)
    (stage / "recipe.yaml").write_text(recipe, encoding="utf-8")


def _metadata(part: Part, items: tuple[ExportTensor, ...], tied: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of the weights file that holds `items`: the source's metadata, the dtype of each weight with scales, and
    the shape of each weight with packed codes. For each omitted name of a tied weight (the keys of `tied`), it also has the name
    under which the weight is written.
    """
    names = {item.name for item in items}
    written = {
        item.name for item in items if not item.copied
    }  # a copied weight keeps its entry in the metadata, which its program may need
    rest = {
        key: value
        for key, value in part.metadata.items()
        if not key.startswith((SCALED_KEY, SHAPE_KEY)) and key not in written
    }
    local = {name.removeprefix(part.prefix): first.removeprefix(part.prefix) for name, first in tied.items()}
    further = {name: first for name, first in local.items() if first in names}
    own = [item for item in items if item.has_scales and item.file_layout is None]
    scaled = {SCALED_KEY + item.name: item.dtype for item in own}
    packed = {
        SHAPE_KEY + item.name: ",".join(map(str, item.shape))
        for item in own
        if (blocks := dtypes.BY_NAME[item.dtype].blocks) is not None and blocks.packing != "none"
    }
    return rest | further | {"format": "pt"} | scaled | packed


def _index(files: Files) -> str:
    weight_map = {entry.name: name for name, items in files.items() for item in items for entry in item.entries}
    total = sum(item.nbytes for items in files.values() for item in items)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"


def shards(contents: Contents, max_shard_size: int | str) -> dict[Part, Files]:
    """Distribute the weights to files of limited size, as huggingface_hub splits a state dict. Returns the weights of each file, by
    part and file name, without the prefix of the part (such as `unet.`) in their names. A weight and its scales are in the same
    file. max_shard_size: the maximum size of a file, in bytes or as in "5GB". Raises UserError if it can't be parsed.
    """
    by_part: dict[Part, dict[str, ExportTensor]] = {part: {} for part in contents.layout.parts}
    for item in contents.items:
        part = max((part for part in by_part if item.name.startswith(part.prefix)), key=lambda part: len(part.prefix))
        local = item.name.removeprefix(part.prefix)
        copies = tuple(structs.replace(each, name=each.name.removeprefix(part.prefix)) for each in item.copies)
        by_part[part][local] = dataclasses.replace(item, name=local, copies=copies)
    return {part: _split(part, items, max_shard_size) for part, items in by_part.items()}


def _split(part: Part, items: dict[str, ExportTensor], max_shard_size: int | str) -> Files:
    from huggingface_hub import split_state_dict_into_shards_factory

    try:
        split = split_state_dict_into_shards_factory(
            items,
            get_storage_size=lambda item: item.nbytes,
            filename_pattern=f"{part.stem}{{suffix}}.safetensors",
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise UserError(f"can't read the shard size {max_shard_size!r}: write it as in 5GB or 500MB") from error
    if part.one_file:
        return {f"{part.stem}.safetensors": tuple(items.values())}
    return {file: tuple(items[name] for name in names) for file, names in split.filename_to_tensors.items()}


def names_of(files: Mapping[Part, Files]) -> tuple[str, ...]:
    """Return the paths, relative to the export, of all weights files."""
    return tuple(
        f"{part.folder}/{name}" if part.folder else name for part, of_part in files.items() for name in of_part
    )
