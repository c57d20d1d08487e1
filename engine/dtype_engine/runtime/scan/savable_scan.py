"""What estimated scans (`scan.py`) and exact ones (`exact.py`) have in common: the file with their results, and their report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

from dtype_engine.checkpoint import FileIdentity
from dtype_engine.core.dtypes import short_name
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import RunSettings
from dtype_engine.core.shard import WHOLE, Shard
from dtype_engine.core.text import printable
from dtype_engine.recipe.loading import OWN
from dtype_engine.results.scan import ScanReport, WeightScore
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes.reference import reference_name
from dtype_engine.runtime.scan import saved as scan_file
from dtype_engine.runtime.scan.cache_writes import scored_bytes
from dtype_engine.runtime.scan.casts import scanned_dtypes, states_left_out
from dtype_engine.runtime.scan.routing import Key
from dtype_engine.runtime.scan.saved import Fingerprint, SavedScan
from dtype_engine.runtime.scan.scanned_roundings import RoundingGains, gain_of, nearest_notices
from dtype_engine.search.families import FAMILIES

DEFAULT_DTYPES = FAMILIES[OWN].dtypes

OnStep = Callable[[str, int, int | None], None]
OnEstimate = Callable[[ScanReport], None]


@dataclass
class SavableScan(ABC):
    """A scan, which may be running, stopped or finished."""

    model: LiveModel
    inputs: Inputs
    dtypes: tuple[str, ...] = DEFAULT_DTYPES
    settings: RunSettings = field(default_factory=RunSettings)
    save: Path | None = None
    """The file in which the results are saved. It is read at the start, and written after each part."""
    unit: str = ""
    forward_seconds: float = 0.0
    scan_seconds: float = 0.0
    shard: Shard = WHOLE
    """Which of the parts this process scans, if a scan is divided among several jobs."""
    on_unsaved: Callable[[str], None] | None = None
    """Called with the reason if `save` can't be written; the scan then continues without it. If None, UserError is raised."""
    calibration: Inputs | None = None
    """The inputs to which weights are rounded, or None if no dtype has a rounding."""
    _seen: FileIdentity | None = None

    def __post_init__(self) -> None:
        self.fingerprint = Fingerprint.of(self.model, self.inputs, self.dtypes, self.settings, self.calibration)
        self.wanted = scanned_dtypes(self.model, self.dtypes)

    def __repr__(self) -> str:
        names = ", ".join(map(short_name, self.dtypes))
        return f"{type(self).__name__}: {printable(self.model.title)} in {names}"

    @abstractmethod
    def saved(self) -> SavedScan:
        """Return all results in the form in which they are saved."""

    def write(self, path: Path) -> None:
        """Save all results in the file `path`. Raises UserError if it can't be written or holds a different scan."""
        self._seen = scan_file.write_joined(path, self.saved(), self._seen)

    def _fitted(self) -> tuple[str, ...]:
        """Return notices on the statistics of roundings, and one if they are of the inputs of the scan."""
        if self.calibration is None:
            return ()
        if self.calibration is not self.inputs:
            return self.model.rounder.notices
        return (
            *self.model.rounder.notices,
            "the roundings were fitted to the same inputs on which the scan was made, so their scores are larger on other text; "
            "--calibration FILE fits them to that of a file",
        )

    def save_if_wanted(self) -> None:
        """Save all results if the scan has a file."""
        if self.save is None:
            return
        try:
            self.write(self.save)
        except UserError as error:
            if self.on_unsaved is None:
                raise
            self.save = None
            self.on_unsaved(str(error))

    def report_of(
        self,
        draws: int,
        sequences: int,
        scores: Mapping[Key, tuple[float, float | None]],
        roundings: RoundingGains = MappingProxyType({}),
    ) -> ScanReport:
        """Return a report. sequences: the number of finished sequences. draws: the number of backward passes per sequence, or 0 for
        an exact scan. scores: (score, standard error) by (weight, dtype). roundings: what the roundings did, as far as known.
        """
        gain = partial(gain_of, roundings, self.model.weights)
        return ScanReport(
            model=self.model.title,
            device=str(self.model.device),
            reference=reference_name(self.model),
            inputs=self.inputs.description,
            unit=self.unit,
            exact=not draws,
            draws=draws,
            sequences=sequences,
            all_sequences=len(self.inputs.batches),
            dtypes=self.dtypes,
            forward_seconds=self.forward_seconds,
            scan_seconds=self.scan_seconds,
            weights=tuple(
                WeightScore(name, dtype, scored_bytes(self.model.tree, name, dtype), *score, gain(name, dtype))
                for (name, dtype), score in scores.items()
            ),
            notices=(
                *self.model.notices,
                *self._fitted(),
                *nearest_notices(roundings, self.model.weights),
                *states_left_out(self.model, self.dtypes),
            ),
            activations=self.settings.quantize_activations,
            coverage=self.model.coverage,
            loader=self.model.loader,
        )
