"""A live model under a recipe that may have inputs: writing it as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import NoForward
from dtype_engine.core.options import RunSettings
from dtype_engine.results.export import ExportReport
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.session.cast_model import CastModel, OnProgress, reading_weights

if TYPE_CHECKING:
    from dtype_engine.runtime.export import Contents


class ExportableModel(CastModel):
    """A model, the recipe in force, the settings it is run in and its inputs.

    inputs: None where the model can't be run; `no_forward` says why then.
    """

    def __init__(self, model: LiveModel, settings: RunSettings) -> None:
        super().__init__(model)
        self.settings = settings
        self.inputs: Inputs | None = None
        self.no_forward: str | None = None

    def export(
        self,
        folder: str | Path,
        max_shard_size: int | str = "5GB",
        on_bytes: OnProgress = ignore,
        cancelled: IsCancelled = never,
        force: bool = False,
    ) -> ExportReport:
        """Write a checkpoint in the dtypes of the recipe in force; the source is not changed.

        Under `quantize_activations="weights"` the checkpoint says so, for the formats that runtimes quantise them in. In NVFP4 the
        inputs are run for it first: their largest values are kept.

        Args:
            folder: A new folder.
            max_shard_size: The most bytes in one file of weights, as a number or as "5GB".
            on_bytes: Called with the bytes written and all there are.
            cancelled: Asked between pieces; nothing is left behind then.
            force: Replace a folder that holds something, when all is written.

        Returns:
            What was written, in bytes and seconds.

        Raises:
            UserError: The folder can't be written, holds something, or there is no room.
            NoForward: Inputs have to be run, and can't be.
            Cancelled: `cancelled()` was true.

        Example:
            >>> report = session.export(folder / "export")
            >>> model = de.load_pretrained(folder / "export")
        """
        from dtype_engine.runtime.export import export

        contents = self.export_contents(cancelled)
        return export(contents, Path(folder), max_shard_size, on_bytes, cancelled, force, self.lost_values(cancelled))

    @reading_weights
    def export_contents(self, cancelled: IsCancelled = never) -> Contents:
        """What `export` writes. Inputs are run where a format keeps a scale of theirs. Raises as `export` does.

        Example:
            >>> session.export_contents().nbytes == session.plan.planned_bytes
            True
        """
        from dtype_engine.runtime.export import of_live
        from dtype_engine.runtime.export.input_scales import needs_calibration
        from dtype_engine.runtime.measure.activation_ranges import input_ranges

        planned = self.plan.dtypes
        contents = of_live(self.model, self.recipe, planned, self.settings)
        if not needs_calibration(contents):
            return contents
        names = [item.name for item in contents.items if item.input_scale is not None]
        ranges = input_ranges(self.model, self.need_inputs(), self.settings, names, cancelled)
        return of_live(self.model, self.recipe, planned, self.settings, ranges)

    def need_inputs(self) -> Inputs:
        """The inputs. Raises NoForward where there are none.

        Example:
            >>> len(session.need_inputs().batches)
            1
        """
        if self.inputs is None:
            raise NoForward(self.no_forward or "the model can't be run")
        return self.inputs
