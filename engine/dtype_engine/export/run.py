"""Writing an export from start to end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from ..checkpoint import Checkpoint
from ..checkpoint.folder import INDEX, SCALED_KEY
from ..errors import UserError
from ..model.live import give_memory_back
from ..options import Options
from ..readings_export import ExportReport
from ..recipe import Recipe
from ..recipe.file import write_recipe
from .claim import clear_up
from .config import export_config, export_dtype
from .contents import Contents, Item, of_checkpoint
from .folder import copy_along, free_name, staged
from .readme import by_dtype, readme
from .write import Progress, write_file

OnBytes = Callable[[int, int], None]
SHARD_SIZE = "5GB"


def export_checkpoint(
    checkpoint: Checkpoint,
    title: str,
    recipe: Recipe,
    folder: Path,
    max_shard_size: int | str = SHARD_SIZE,
    options: Options | None = None,
    on_bytes: OnBytes = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
    force: bool = False,
) -> ExportReport:
    """Export a checkpoint under a recipe without loading it; see `export`."""
    contents = of_checkpoint(checkpoint, title, recipe, options)
    return export(contents, folder, max_shard_size, on_bytes, cancelled, force)


def export(
    contents: Contents,
    folder: Path,
    max_shard_size: int | str = SHARD_SIZE,
    on_bytes: OnBytes = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
    force: bool = False,
) -> ExportReport:
    """Write an export to a new folder, streamed: never more than one tensor in memory, and of plain casts only a piece.

    `max_shard_size`: bytes, or as in "5GB". `on_bytes` hears the bytes written and those there will be. Until all is written
    the folder does not exist. `force`: one of that name is replaced when all is written, but never the source. Raises UserError
    (no room, a folder that holds something, a dtype that can't be stored) and Cancelled, and leaves nothing then.
    """
    started = time.perf_counter()
    clear_up(folder.expanduser().absolute())
    target = free_name(folder, force, contents.files)
    config = export_config(contents)
    files = shards(contents, max_shard_size)
    progress = Progress(contents.nbytes, on_bytes, cancelled)
    progress.wrote(0)
    sums = by_dtype(contents)
    with staged(target, contents.nbytes, force) as stage:
        notices = contents.notices
        if contents.folder is not None and contents.config is not None:
            notices += copy_along(contents.folder, stage)
        if config is not None:
            (stage / "config.json").write_text(
                json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
        (stage / "recipe.yaml").write_text(write_recipe(contents.recipe, contents.title), encoding="utf-8")
        (stage / "README.md").write_text(readme(contents, target.name, sums), encoding="utf-8")
        for name, items in files.items():
            write_file(stage / name, items, _metadata(items), progress)
        if len(files) > 1:
            weight_map = {piece.name: name for name, items in files.items() for item in items for piece in item.pieces}
            index = {"metadata": {"total_size": contents.nbytes}, "weight_map": weight_map}
            (stage / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    give_memory_back()
    return ExportReport(
        folder=str(target),
        model=contents.title,
        rules=tuple(map(str, contents.recipe.rules)),
        config_dtype=export_dtype(contents),
        nbytes=contents.nbytes,
        files=tuple(files),
        dtypes=sums,
        seconds=time.perf_counter() - started,
        notices=notices,
    )


def _metadata(items: tuple[Item, ...]) -> dict[str, str]:
    return {"format": "pt"} | {SCALED_KEY + item.name: item.dtype for item in items if item.scaled}


def shards(contents: Contents, max_shard_size: int | str) -> dict[str, tuple[Item, ...]]:
    """File names and what goes into each, as huggingface_hub splits a state dict; a weight and its scales stay together."""
    from huggingface_hub import split_state_dict_into_shards_factory

    items = {item.name: item for item in contents.items}
    try:
        split = split_state_dict_into_shards_factory(
            items,
            get_storage_size=lambda item: item.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise UserError(f"can't read the shard size {max_shard_size!r}: write it as in 5GB or 500MB") from error
    return {file: tuple(items[name] for name in names) for file, names in split.filename_to_tensors.items()}
