"""Writes an export to the path that the user names: to a folder or, if the name ends like that of a weights file, to one file.

One file holds weights and nothing else: `net.safetensors` is a safetensors file, and `net.pth` is a state dict that `torch.load`
reads. Formats with scales are refused, because loaders need a `config.json` to use the scales.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from dtype_engine.checkpoint.export_folder import check_export, is_one_file
from dtype_engine.checkpoint.weight_files import PICKLES
from dtype_engine.core.atomic_write import fsync_dir, rename_new, umask
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.core.export_lock import PARTIAL, locked, recover_stale, sibling
from dtype_engine.core.kv_formats import names_caches
from dtype_engine.core.units import human_bytes
from dtype_engine.results.export import ExportReport
from dtype_engine.results.losses import ValueLoss
from dtype_engine.runtime.export.contents import Contents
from dtype_engine.runtime.export.export import SHARD_SIZE, OnBytes, export_folder

_SLACK = 2 << 20
"""The number of bytes that must be free on the disk in addition to the weights, for headers and small files."""


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
    """Write an export to the folder `target`, as `export_folder` does, or to one file if `target` ends in `.safetensors`, `.pth`,
    `.pt`, `.bin` or `.ckpt`. The arguments are those of `export_folder`; one file has no shards, so `max_shard_size` is not used
    for it.

    A PyTorch file is made from a safetensors file that is written next to it, mapped, and removed afterwards. So the weights need
    not fit in memory, but the disk must have space for both. Raises what `export_folder` raises, and UserError if one file can't
    hold the export.
    """
    if not is_one_file(target):
        return export_folder(contents, target, max_shard_size, on_bytes, cancelled, force, lost, incomplete)
    started = time.perf_counter()
    target = check_export(target, force, contents.files)
    if (reason := _reason_against(contents)) is not None:
        raise UserError(f"{target.name} would be one file of weights, but {reason}; name a folder instead")
    pickled = target.name.endswith(PICKLES)
    count = _Count(on_bytes, contents.nbytes * (2 if pickled else 1), cancelled)
    free = shutil.disk_usage(target.parent).free
    if free < count.total + _SLACK:
        raise UserError(
            f"exporting to {target} needs {human_bytes(count.total)} and {human_bytes(free)} are free there; free some space or "
            "name a file elsewhere"
        )
    recover_stale(target)
    work = sibling(target, PARTIAL)
    written = work / target.name
    try:
        work.mkdir(0o700)
        with locked(work):
            report = export_folder(
                contents, work / "folder", contents.nbytes + 1, count.of_folder, cancelled, False, lost, incomplete
            )
            weights = work / "folder" / report.files[0]
            if pickled:
                _save_pickle(weights, contents, written, count)
            else:
                os.rename(weights, written)
            os.chmod(written, 0o666 & ~umask())
            with open(written, "rb") as file:
                os.fsync(file.fileno())
            os.replace(written, target) if force else rename_new(str(written), target)
        fsync_dir(target.parent)
    except FileExistsError:
        raise UserError(f"{target} exists now; name another file") from None
    except OSError as error:
        raise UserError(f"exporting to {target} failed: {error.strerror}; nothing was left there") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    notices = report.notices + _left_out(contents)
    seconds = time.perf_counter() - started
    return dataclasses.replace(report, folder=str(target), files=(target.name,), notices=notices, seconds=seconds)


class _Count:
    """Reports the progress of an export to one file. A PyTorch file counts its weights twice, because they are first written to a
    safetensors file.

    on_bytes: called with (the number of bytes written until now, `total`). total: the number of bytes to write in all. cancelled:
    checked before each block.
    """

    def __init__(self, on_bytes: OnBytes, total: int, cancelled: IsCancelled) -> None:
        self._on_bytes, self.total, self._cancelled = on_bytes, total, cancelled
        self._done = 0

    def of_folder(self, done: int, total: int) -> None:
        """Report how many bytes of the folder are written. total: ignored; the folder may count copied files as well."""
        self._done = min(done, self.total)
        self._on_bytes(self._done, self.total)

    def add(self, size: int) -> None:
        """Report that `size` more bytes are written. Raises Cancelled."""
        if self._cancelled():
            raise Cancelled
        self._done = min(self._done + size, self.total)
        self._on_bytes(self._done, self.total)


def _save_pickle(weights: Path, contents: Contents, target: Path, count: _Count) -> None:
    """Write the weights in the safetensors file `weights` to `target` as a state dict, by `torch.save`. A tied weight is an entry
    under each of its names, as in a module's state dict, but its values are stored only once.

    contents: what is exported, which gives the order of the weights and the names of tied ones. count: is told each block that is
    written.
    """
    state = load_file(weights)  # mapped, not read
    ordered = {item.name: state[item.name] for item in contents.items if item.name in state}
    ordered |= {name: value for name, value in state.items() if name not in ordered}
    ordered |= {name: ordered[first] for name, first in contents.tied.items() if first in ordered}
    with open(target, "wb") as file:
        write = file.write

        class Counted:
            """The file with the methods that `torch.save` calls. Each write is added to `count`."""

            def write(self, data: bytes) -> int:
                count.add(len(data))
                return write(data)

            def flush(self) -> None:
                file.flush()

        try:
            torch.save(ordered, Counted())  # type: ignore[arg-type]
        except RuntimeError as error:  # torch raises it after a failed write, whose error is its context
            raise error.__context__ or error from None


def _reason_against(contents: Contents) -> str | None:
    """Return why one file can't hold the export, in words that follow "but", or None if it can."""
    if len(contents.layout.parts) > 1:
        return f"{contents.title} is a pipeline with a folder for each component"
    if scaled := [item for item in contents.items if item.has_scales]:
        return (
            f"{len(scaled)} weights (first {scaled[0].name}, {scaled[0].dtype}) have scales, which need a config.json"
        )
    if coded := [item for item in contents.items if item.copied]:
        return (
            f"{len(coded)} weights (first {coded[0].name}) stay as codes ({coded[0].stored}), which need a config.json"
        )
    if any(names_caches(rule.pattern) for rule in contents.recipe.rules):
        return "the formats of KV caches need the files of a folder"
    return None


def _left_out(contents: Contents) -> tuple[str, ...]:
    """Return a notice that names the files which only an export to a folder contains, or () if the source has no config.json."""
    if contents.config is None:
        return ()
    return ("only the weights are written: config.json and the tokenizer's files are in an export to a folder",)
