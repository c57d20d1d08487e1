"""Saves a comparison of two checkpoints' weights to a JSON file, from which a later run continues."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core.atomic_write import write_text_atomic
from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import read_regular, reading
from dtype_engine.core.throttle import Throttle
from dtype_engine.core.typed_data import as_plain, as_type
from dtype_engine.results.weights import WeightDifference

_KIND = "dtype-engine weights"
_LARGEST = 1 << 30
_EVERY = 300
"""The file is written at most once in this many tenths of a second, since it is written whole."""


class _File(msgspec.Struct):
    """The content of a saved comparison."""

    kind: str
    files: list[tuple[str, int, int]]
    """The name, size in bytes and modification time in nanoseconds of each file of both checkpoints."""
    weights: list[WeightDifference]


class SavedDifferences:
    """The differences that earlier runs have computed, kept in the file `path` together with those of this run.

    Raises UserError if the file holds something else, or a comparison of other files.
    """

    def __init__(self, path: Path, reference: Checkpoint, candidate: Checkpoint) -> None:
        self._path = path
        self._throttle = Throttle(first=False, every=_EVERY)
        identities = (*reference.identities, *candidate.identities)
        self._files = [(file.path.name, file.size, file.mtime_ns) for file in identities]
        self.found: dict[tuple[str, str], WeightDifference] = {}
        """The differences by the names of the weight in the reference and in the candidate."""
        if path.exists():
            for weight in self._read().weights:
                self.add(weight)

    def add(self, weight: WeightDifference) -> None:
        """Add a difference. The file is written from time to time."""
        self.found[weight.reference_name, weight.name] = weight
        if self._throttle.due():
            self.write()

    def write(self) -> None:
        """Write the file. Raises UserError if that is not possible."""
        file = _File(_KIND, self._files, [*self.found.values()])
        write_text_atomic(self._path, json.dumps(as_plain(file)), replace=True)

    def _read(self) -> _File:
        try:
            with reading(f"the saved comparison {self._path}"):
                file = as_type(json.loads(read_regular(self._path, _LARGEST)), _File)
        except (ValueError, RecursionError, UserError) as error:
            if isinstance(error, UserError) and "can't read" in str(error):
                raise
            raise UserError(f"{self._path} is not a saved comparison; remove it or give another file") from None
        if file.kind != _KIND or file.files != self._files:
            raise UserError(
                f"the saved comparison {self._path} was made with other files, or they have changed; remove it or give another file"
            )
        return file
