"""Reads and writes saved measurements of drift. A JSON file has the results of each finished sequence, and a fingerprint of the
model, the inputs, the rules and the settings with which they were measured.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from dtype_engine.core.atomic_write import write_text_atomic
from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import read_regular, reading
from dtype_engine.core.typed_data import as_plain, as_type
from dtype_engine.runtime.measure.running_totals import SavedTotals
from dtype_engine.runtime.scan.saved import Fingerprint, different

_VERSION = 1
_LARGEST = 4 << 30
_OTHER = {"model": "another model", "inputs": "other inputs", "dtypes": "other rules", "settings": "other settings"}


class SavedDrift(msgspec.Struct):
    """The content of the file of a saved measurement. `fingerprint.dtypes` holds the rules of the recipe."""

    fingerprint: Fingerprint
    totals: SavedTotals
    drift_version: int


def write(path: Path, fingerprint: Fingerprint, totals: SavedTotals) -> None:
    """Save a measurement to the file `path`, which is replaced atomically. fingerprint: what was measured. totals: the results
    until now. Raises UserError if the file can't be written.
    """
    # The json module is used because msgspec's JSON can't represent infinity.
    write_text_atomic(path, json.dumps(as_plain(SavedDrift(fingerprint, totals, _VERSION))), replace=True)


def read(path: Path, expected: Fingerprint, sequences: int) -> SavedTotals:
    """Return the results in the file of a saved measurement. Raises UserError if the file is not a saved measurement, or if its
    model, inputs, rules or settings differ from those of `expected`. sequences: the number of sequences in the inputs.
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
    if differing := different(saved.fingerprint, expected):
        what = " and ".join(_OTHER[each] for each in differing)
        raise UserError(f"the saved drift {path} was measured with {what}; remove it or give another file")
    if len(numbers) < len(saved.totals.sequences) or not numbers <= set(range(sequences)):
        raise UserError(f"{path} is not a saved drift (its sequences); remove it or give another file")
    return saved.totals
