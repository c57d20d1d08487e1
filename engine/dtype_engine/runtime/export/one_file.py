"""Writes an export to one file of weights, such as `net.safetensors` or `net.pth` (a state dict that `torch.load` reads), if the
name that the user gave ends like that. Formats with scales are refused, because loaders need a `config.json` to use the scales.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from dtype_engine.checkpoint.export_folder import check_export
from dtype_engine.checkpoint.weight_files import PICKLES
from dtype_engine.core.atomic_write import fsync_dir, rename_new, umask
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import UserError
from dtype_engine.core.export_lock import PARTIAL, locked, recover_stale, sibling
from dtype_engine.results.export import ExportReport
from dtype_engine.runtime.export.contents import Contents
from dtype_engine.runtime.export.staging import need_space
from dtype_engine.runtime.export.write import OnBytes, Progress

WriteFolder = Callable[[Path, OnBytes], ExportReport]
"""A function that writes an export to a new folder, and calls the given function with the number of bytes written and the total."""


def export_file(
    contents: Contents, target: Path, force: bool, on_bytes: OnBytes, cancelled: IsCancelled, write_folder: WriteFolder
) -> ExportReport:
    """Write an export to one file, `target`. First, `write_folder` writes the export to a temporary folder next to `target`. The
    only weights file of this folder is then renamed to `target`. For a PyTorch file, the weights are instead mapped and written
    once more, so they need not fit in memory, but the disk must have space for them twice.

    force: whether to replace an existing file. on_bytes: called with the number of bytes written and the total. Raises Cancelled,
    and UserError if one file can't hold the export or can't be written. After an error, nothing is left on the disk.
    """
    started = time.perf_counter()
    target = check_export(target, force, contents.files)
    if (reason := reason_against(contents)) is not None:
        raise UserError(f"{target.name} would be one file of weights, but {reason}; name a folder instead")
    pickled = target.name.endswith(PICKLES)
    # The weights of a PyTorch file are written twice. The folder may count copied files as well.
    total = contents.nbytes * (2 if pickled else 1)
    progress = Progress(total, lambda done, total: on_bytes(min(done, total), total), cancelled)

    def of_folder(done: int, _: int) -> None:
        progress.done = min(done, total)
        on_bytes(progress.done, total)

    need_space(target, total)
    recover_stale(target)
    work = sibling(target, PARTIAL)
    written = work / target.name
    try:
        work.mkdir(0o700)
        with locked(work):
            report = write_folder(work / "folder", of_folder)
            (name,) = report.files
            if pickled:
                _save_pickle(work / "folder" / name, contents, written, progress)
            else:
                os.rename(work / "folder" / name, written)
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
    notices = report.notices
    if contents.config is not None:
        notices += ("only the weights are written: config.json and the tokenizer's files are in an export to a folder",)
    seconds = time.perf_counter() - started
    return dataclasses.replace(report, folder=str(target), files=(target.name,), notices=notices, seconds=seconds)


def _save_pickle(weights: Path, contents: Contents, target: Path, progress: Progress) -> None:
    """Write the weights in the safetensors file `weights` to `target` as a state dict, in the order of `contents`. A tied weight is
    an entry under each of its names, as in a module's state dict, but its values are stored only once.
    """
    state = load_file(weights)  # mapped, not read
    ordered = {item.name: state[item.name] for item in contents.items if item.name in state}
    ordered |= {name: value for name, value in state.items() if name not in ordered}
    ordered |= {name: ordered[first] for name, first in contents.tied.items() if first in ordered}
    with open(target, "wb") as file:
        write = file.write

        class Counted:
            """A file object for `torch.save` that reports the bytes written to `progress`."""

            def write(self, data: bytes) -> int:
                progress.wrote(len(data))
                return write(data)

            def flush(self) -> None:
                file.flush()

        try:
            torch.save(ordered, Counted())  # type: ignore[arg-type]
        except RuntimeError as error:  # torch raises it after a failed write, whose error is its context
            raise error.__context__ or error from None


def reason_against(contents: Contents) -> str | None:
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
    if contents.has_cache_formats:
        return "the formats of KV caches need the files of a folder"
    return None
