"""Saves scans on the engine's machine, so that a later engine can resume them, even after a crash."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dtype_engine.core.errors import UserError
from dtype_engine.core.user_folders import state_folder
from dtype_engine.reports.versions import versions

if TYPE_CHECKING:
    from dtype_engine.runtime.scan.scan import Scan

MOST_KEPT = 20


def kept_scans_folder() -> Path:
    return state_folder() / "scans"


def keep(scan: Scan, on_unsaved: Callable[[str], None]) -> None:
    """Save a scan's results after every sequence, and continue it from those that an earlier engine saved for the same weights,
    inputs, dtypes and library versions.

    If the file can't be written, `on_unsaved` is called once with the reason, and the scan continues unsaved.
    """
    if scan.save is not None:
        return
    folder = kept_scans_folder()
    about = f"{scan.fingerprint} {scan.backward_passes} {versions()}"
    path = folder / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _prune(folder)
    except OSError as error:
        on_unsaved(f"can't write to {folder}: {error.strerror}")
        return
    try:
        scan.keep_in(path, on_unsaved)
    except UserError:  # the saved scan is damaged, so this one starts at the beginning
        with contextlib.suppress(OSError):
            path.unlink()
        scan.save, scan.on_unsaved = path, on_unsaved


def _prune(folder: Path) -> None:
    """Delete all but the newest `MOST_KEPT` scans in a folder."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for file in files[MOST_KEPT:]:
        file.unlink(missing_ok=True)
