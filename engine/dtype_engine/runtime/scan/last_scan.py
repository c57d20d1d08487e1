"""Keeps the scan that was requested last, so that a further request with the same parameters continues it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.kv_formats import SCANNED, parse_scanned
from dtype_engine.core.options import RunSettings
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.scan.exact import ExactScan
from dtype_engine.runtime.scan.scan import Scan

ScanTask = Scan | ExactScan


@dataclass
class LastScan:
    calibration: Callable[[], Inputs]
    """Returns the inputs to which weights are rounded. Raises UserError and NoForward if they can't be made."""
    _requested: object = None
    _task: ScanTask | None = None

    def get(
        self,
        model: LiveModel,
        inputs: Inputs,
        settings: RunSettings,
        names: Sequence[str],
        draws: int | None,
        exact: bool,
        save: Path | None,
    ) -> ScanTask:
        """Return the scan that was requested last if its parameters are the same, otherwise a new one.

        names: the dtypes and cache formats to scan. draws: the number of backward passes for each sequence; None for the default.
        exact: whether to measure instead of estimating. save: the file in which the scan is saved, or None. Raises UserError if
        `names` is empty, if a dtype is unknown or "stored", and if the file `save` holds a scan with other parameters. Raises what
        `calibration` raises if a dtype has a rounding.
        """
        targets = tuple(dict.fromkeys(map(parse_scanned, names)))
        if {dtypes.STORED, SCANNED + dtypes.STORED}.intersection(targets) or not targets:
            raise UserError(f"a scan needs dtypes to cast to: {', '.join(dtypes.CASTABLE_DTYPES)}")
        settings = settings.of_weights()
        requested = (id(inputs), targets, settings, draws, exact, save)
        if self._task is None or requested != self._requested:
            rounded = any(each in dtypes.BY_NAME and dtypes.BY_NAME[each].rounding for each in targets)
            calibration = self.calibration() if rounded else None
            self._task = (
                ExactScan(model, inputs, targets, settings, save, calibration=calibration)
                if exact
                else Scan(model, inputs, targets, settings, save, calibration=calibration, draws=draws)
            )
            self._requested = requested
        return self._task
