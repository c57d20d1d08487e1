"""Saves a comparison of the weights of two checkpoints to a JSON file, which a later run reads in order to continue it."""

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
"""The value of the entry `kind`, which marks a file as a saved comparison."""
_LARGEST = 1 << 30
_EVERY = 300
"""The minimum time between two writes, in tenths of a second. Each write replaces the whole file."""


class ComparisonFile(msgspec.Struct):
    """The content of a file of a saved comparison."""

    kind: str
    files: list[tuple[str, int, int, int]]
    """(name, size in bytes, times of the last modification and the last change in nanoseconds) of each file of both checkpoints."""
    weights: list[WeightDifference]


class SavedDifferences:
    """The known differences between the weights of two checkpoints, which are saved in the file `path`. If the file exists, its
    differences are read first. Raises UserError if the file is not a saved comparison, or compares other checkpoint files.
    """

    def __init__(self, path: Path, reference: Checkpoint, candidate: Checkpoint) -> None:
        self._path = path
        self._throttle = Throttle(first=False, every=_EVERY)
        identities = (*reference.identities, *candidate.identities)
        self._files = [(file.path.name, file.size, file.mtime_ns, file.ctime_ns) for file in identities]
        self.found: dict[tuple[str, str], WeightDifference] = {}
        """All differences so far, by (name of the weight in the reference checkpoint, its name in the candidate)."""
        if path.exists():
            for weight in self._read().weights:
                self.add(weight)

    def add(self, weight: WeightDifference) -> None:
        """Add the difference of one weight, and save all if the last write was long enough ago."""
        self.found[weight.reference_name, weight.name] = weight
        if self._throttle.due():
            self.write()

    def write(self) -> None:
        """Save all differences to the file. Raises UserError if it can't be written."""
        file = ComparisonFile(_KIND, self._files, [*self.found.values()])
        write_text_atomic(self._path, json.dumps(as_plain(file)), replace=True)

    def _read(self) -> ComparisonFile:
        try:
            with reading(f"the saved comparison {self._path}"):
                file = as_type(json.loads(read_regular(self._path, _LARGEST)), ComparisonFile)
        except (ValueError, RecursionError, UserError) as error:
            if isinstance(error, UserError) and "can't read" in str(error):
                raise
            raise UserError(f"{self._path} is not a saved comparison; remove it or give another file") from None
        if file.kind != _KIND or file.files != self._files:
            raise UserError(
                f"the saved comparison {self._path} was made with other files, or they have changed; remove it or give another file"
            )
        return file
