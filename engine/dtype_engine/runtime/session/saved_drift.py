"""Reads and writes saved measurements of drift: JSON files with a fingerprint and the results of finished sequences."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dtype_engine.core.atomic_write import check_target, write_text_atomic
from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import read_regular, reading
from dtype_engine.core.throttle import INTERVAL_S, Throttle
from dtype_engine.core.typed_data import as_plain, as_type
from dtype_engine.runtime.measure.drift import DriftMeter
from dtype_engine.runtime.measure.listener import MeasurementListener
from dtype_engine.runtime.measure.running_totals import RunningTotals, SavedTotals
from dtype_engine.runtime.numerics.compare.pictures import picture_range
from dtype_engine.runtime.scan.saved import Fingerprint, different

_VERSION = 1
_LARGEST = 4 << 30
_BETWEEN_S = 5.0
"""Seconds between two writes. Each one writes the results of all finished sequences."""
_OTHER = {
    "model": "another model",
    "inputs": "other inputs",
    "dtypes": "other rules",
    "settings": "other settings",
    "calibration": "other calibration inputs",
}


class SavedDrift(msgspec.Struct):
    """The content of the file of a saved measurement. `fingerprint.dtypes` holds the rules of the recipe."""

    fingerprint: Fingerprint
    totals: SavedTotals
    drift_version: int


@contextmanager
def saving(
    path: Path, fingerprint: Fingerprint, meter: DriftMeter, listener: MeasurementListener
) -> Iterator[tuple[MeasurementListener, RunningTotals | None]]:
    """Save a measurement to the file `path` every few seconds while the `with` block measures with `meter`, and when the block ends
    for any reason. Yields (a listener that does what `listener` does and also saves, the totals in the file or None if the file
    does not exist).

    fingerprint: identifies the measurement. Raises UserError if the file can't be written or is that of another measurement, or if
    the model makes pictures.
    """
    path = check_target(path, replace=True)  # before hours of measuring
    if picture_range(meter.model.module) is not None:
        raise UserError("--save: the pictures that this model makes are not saved")
    sequences, on_sequence = len(meter.inputs.batches), listener.on_sequence
    begun = None
    if path.exists():
        saved = read(path, fingerprint, sequences)
        embedding = meter.embedding(saved.output_name, saved.dimensions)
        begun = RunningTotals.restored(saved, sequences, meter.routed, embedding)
    finished: list[RunningTotals] = []
    throttle = Throttle(every=_BETWEEN_S / INTERVAL_S)
    is_unsaved = False

    def save(totals: RunningTotals) -> None:
        nonlocal is_unsaved
        if is_unsaved:
            return
        try:
            write(path, fingerprint, totals.saved())
        except UserError as error:
            if listener.on_unsaved is None:
                raise
            is_unsaved = True
            listener.on_unsaved(str(error))

    def keep(totals: RunningTotals) -> None:
        finished[:] = [totals]
        if throttle.due():
            save(totals)
        if on_sequence is not None:
            on_sequence(totals)

    try:
        yield dataclasses.replace(listener, on_sequence=keep, saves=True), begun
    finally:
        for totals in finished:
            save(totals)


def write(path: Path, fingerprint: Fingerprint, totals: SavedTotals) -> None:
    """Write a measurement's fingerprint and results to the file `path`, atomically. Raises UserError on failure."""
    # The json module is used because msgspec's JSON can't represent infinity.
    write_text_atomic(path, json.dumps(as_plain(SavedDrift(fingerprint, totals, _VERSION))), replace=True)


def read(path: Path, expected: Fingerprint, sequences: int) -> SavedTotals:
    """Return the results in the file of a saved measurement. Raises UserError if it is no such file, or not of the measurement
    `expected`.

    sequences: the number of sequences in the inputs.
    """
    with reading(f"the saved drift {path}"):
        text = read_regular(path, _LARGEST)
    try:
        saved = as_type(json.loads(text), SavedDrift)
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not a saved drift; remove it or give another file") from None
    except UserError as error:
        raise UserError(f"{path} is not a saved drift ({error}); remove it or give another file") from None
    if saved.drift_version != _VERSION:
        raise UserError(f"{path} was saved by another version of this program; remove it or give another file")
    numbers = {one.number for one in saved.totals.sequences}
    widths = {one.vectors.width for one in saved.totals.sequences if one.vectors is not None}
    if differing := different(saved.fingerprint, expected):
        what = " and ".join(_OTHER[each] for each in differing)
        raise UserError(f"the saved drift {path} was measured with {what}; remove it or give another file")
    if (
        len(numbers) < len(saved.totals.sequences)
        or len(widths) > 1
        or not all(number < sequences for number in numbers)
        or not all(one.fits(saved.totals.classes_dim, saved.totals.acceptance) for one in saved.totals.sequences)
    ):
        raise UserError(f"{path} is not a saved drift (its sequences); remove it or give another file")
    return saved.totals
