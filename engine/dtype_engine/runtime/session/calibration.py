"""Runs a model on its calibration inputs, and collects what the roundings of a recipe need."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from dtype_engine.core import dtypes
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.input_args import other_inputs
from dtype_engine.core.options import Options
from dtype_engine.core.roundings import ROUNDINGS, Statistic
from dtype_engine.results.rounding import FittedTo
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.measure.input_statistics import collect_statistics
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.roundings import WeightStatistics
from dtype_engine.runtime.passes.model_behavior import ModelBehavior
from dtype_engine.runtime.scan.saved import hash_of
from dtype_engine.runtime.session.component_inputs import inputs_of


class Calibration:
    """The calibration inputs of a model. measured: returns the inputs on which drift is measured, which are used if the options
    name no others.
    """

    def __init__(
        self, model: LiveModel, options: Options, behavior: ModelBehavior, measured: Callable[[], Inputs]
    ) -> None:
        self._model, self._options, self._behavior, self._measured = model, options, behavior, measured

    @functools.cached_property
    def inputs(self) -> Inputs:
        """The calibration inputs. Those of the first use stay. Raises UserError and NoForward if they can't be made."""
        options = other_inputs(self._options, self.files) if self.files else None
        return self._measured() if options is None else inputs_of(self._model, options)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the user named for calibration."""
        return self._options.calibration

    @property
    def on_measured_inputs(self) -> bool:
        """Whether roundings are fitted to the inputs on which drift is measured now."""
        return self.inputs is self._measured()

    @functools.cached_property
    def fitted_to(self) -> FittedTo:
        """What a recipe file says of the calibration inputs. Raises UserError and NoForward as `inputs` does."""
        names = ", ".join(path.name for path in self.files)
        return FittedTo(
            f"{names}: {self.inputs.description}" if names else self.inputs.description, hash_of(self.inputs)
        )

    def runs(self, rounded: Mapping[str, str]) -> int:
        """Return how many runs over one sequence `collect` makes. Raises UserError and NoForward as `inputs` does."""
        return len(list(self._groups(rounded))) * len(self.inputs.batches) if rounded else 0

    def collect(
        self, rounded: Mapping[str, str], on_run: Callable[[], None], cancelled: IsCancelled
    ) -> Iterator[dict[str, WeightStatistics]]:
        """Yield the statistics of as many weights at a time as fit in memory, from one reference run over all calibration inputs
        for each group. Weights that no matrix product uses are left out. rounded: the weights' new dtypes, by name. on_run: called
        after each sequence. Raises NoForward, KernelError, Cancelled, and UserError as `inputs` does.
        """
        for group in self._groups(rounded):
            yield collect_statistics(self._model, self.inputs, group, self._behavior, on_run, cancelled)

    def _groups(self, rounded: Mapping[str, str]) -> Iterator[dict[str, Statistic]]:
        budget, group, held = self._model.cache_budget, dict[str, Statistic](), 0
        for name, dtype in rounded.items():
            need = ROUNDINGS[dtypes.BY_NAME[dtype].rounding].needs
            nbytes = self._most_bytes(name) if need == "products" else 0
            if group and held + nbytes > budget:
                yield group
                group, held = {}, 0
            group[name] = need
            held += nbytes
        if group:
            yield group

    def _most_bytes(self, name: str) -> int:
        """Return the most bytes that the products of a weight's inputs take: those of its longest dimension."""
        shape = self._model.weights[name].stored.shape
        count = shape[0] if len(shape) > 2 else 1
        return 4 * count * max(shape[-2:], default=0) ** 2
