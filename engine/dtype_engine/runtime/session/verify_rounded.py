"""Compares the errors of an export's rounded weights with those of the nearest values, over the calibration inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import NoForward
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.recipe.file import read_recipe_file
from dtype_engine.results.export import TensorDifference, VerifyReport
from dtype_engine.runtime.export.contents import Contents, ExportTensor
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.model.name_mapping import Placement, map_names
from dtype_engine.runtime.numerics.roundings import WeightStatistics
from dtype_engine.runtime.session.calibration import Calibration
from dtype_engine.runtime.verify.exported_values import read_export
from dtype_engine.runtime.verify.rounded import has_larger_error
from dtype_engine.runtime.verify.source_values import SourceValues
from dtype_engine.runtime.verify.verify import OpenExport


def with_rounding_errors(
    report: VerifyReport,
    model: LiveModel,
    calibration: Calibration | None,
    contents: Contents,
    source: SourceValues,
    folder: Path,
    cancelled: IsCancelled,
) -> VerifyReport:
    """Return the report of an export with a difference for each weight that a rounding has made worse than the nearest values are.
    If the calibration inputs are not those of the export, `unchecked` says that this was not checked. Raises Cancelled,
    KernelError, and UserError if the calibration inputs can't be made.
    """
    rounded = {item.name: item for item in contents.items if item.rounding}
    if not rounded:
        return report
    why = _why_unchecked(calibration, folder)
    if why or calibration is None:
        sentence = (
            f"{plural(len(rounded), 'weight')} with roundings: whether scales and codes are of the format was checked, but not "
            f"whether the layers' errors are smaller than with the nearest values: {why}"
        )
        return dataclasses.replace(report, unchecked=(*report.unchecked, sentence))
    of_files = model.checkpoint.weights if model.checkpoint is not None else model.weights
    check = _Check(OpenExport(contents, source, read_export(folder)), rounded, map_names(model.module, of_files))
    differences = list(report.differences)
    checked = set[str]()
    wanted = {check.placements[name].name: f"{item.dtype}:{item.rounding}" for name, item in rounded.items()}
    for statistics in calibration.collect(wanted, ignore, cancelled):
        for name in rounded:
            if check.placements[name].name in statistics:
                checked.add(name)
                differences += check.problems(name, statistics)
    unchecked = report.unchecked
    if left := [name for name in rounded if name not in checked]:
        unchecked = (*unchecked, f"no calibration run used {plural(len(left), 'weight')}, first {printable(left[0])}")
    return dataclasses.replace(report, differences=tuple(differences), unchecked=unchecked)


def _why_unchecked(calibration: Calibration | None, folder: Path) -> str:
    """Return why the errors can't be compared, or ""."""
    written = read_recipe_file(folder / "recipe.yaml").fitted_to
    if written is None:
        return "recipe.yaml does not say to what they were fitted"
    if calibration is None:
        return "the model can't be run"
    try:
        same = calibration.fitted_to.fingerprint == written.fingerprint
    except NoForward as error:
        return str(error)
    return "" if same else f"they were fitted to {printable(written.inputs)}; --calibration FILE names it"


@dataclass(frozen=True, slots=True)
class _Check:
    """Compares the errors of an export's rounded weights. placements: where each tensor of the files is in the model."""

    opened: OpenExport
    rounded: Mapping[str, ExportTensor]
    placements: Mapping[str, Placement]

    def problems(self, name: str, statistics: Mapping[str, WeightStatistics]) -> list[TensorDifference]:
        """Return a difference if a weight has a larger error than the nearest values, or []."""
        item, placement = self.rounded[name], self.placements[name]
        place = placement.place if placement.part else None
        found = has_larger_error(
            self.opened.source.read(name),
            self.opened.stored(item)[0],
            f"{item.dtype}:{item.rounding}",
            statistics[placement.name],
            self.opened.shared(item),
            None if place is None else place[0],
        )
        return [] if found is None else [TensorDifference(name, found)]
