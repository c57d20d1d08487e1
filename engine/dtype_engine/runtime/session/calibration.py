"""Runs a model on its calibration inputs, and collects what the roundings of a recipe need."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Set
from contextlib import closing
from functools import partial
from itertools import zip_longest
from pathlib import Path

from dtype_engine.core import dtypes
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import UserError
from dtype_engine.core.handed_over import handed_over
from dtype_engine.core.input_args import other_inputs
from dtype_engine.core.options import Options
from dtype_engine.core.roundings import ROUNDINGS, Statistic
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes
from dtype_engine.results.rounding import FittedTo
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.measure.input_statistics import collect_statistics, statistics_by_block
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.roundings import WeightStatistics
from dtype_engine.runtime.passes.model_behavior import ModelBehavior
from dtype_engine.runtime.scan.saved import hash_of
from dtype_engine.runtime.session.component_inputs import inputs_of
from dtype_engine.runtime.weights.budget import BLOCKS


class Calibration:
    """The calibration inputs of a model. measured: returns the inputs on which drift is measured, which are used if the options
    name no others.
    """

    def __init__(
        self, model: LiveModel, options: Options, behavior: ModelBehavior, measured: Callable[[], Inputs]
    ) -> None:
        self._model, self._options, self._behavior, self._measured = model, options, behavior, measured
        self._again: Set[str] | None = None
        self._channels: dict[str, int] = {}
        """The numbers of input channels, as far as known, by the weights' names."""

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
        """Return how many runs over one sequence `collect` counts by `on_run`: none if the model is larger than memory, in which
        all sequences end at once. Raises UserError and NoForward as `inputs` does.
        """
        if self._model.memory.limited:
            return 0
        return len(list(self._groups(rounded))) * len(self.inputs.batches) if rounded else 0

    def collect(
        self, rounded: Mapping[str, str], on_run: Callable[[], None], cancelled: IsCancelled
    ) -> Generator[dict[str, WeightStatistics]]:
        """Yield the statistics of as many weights at a time as fit in memory, from one reference run over all calibration inputs
        for each group. Weights that no matrix product uses are left out. rounded: the weights' new dtypes, by name. on_run: called
        after each sequence. Raises NoForward, KernelError, Cancelled, and UserError as `inputs` does.

        If the model is larger than memory, the statistics of each block are yielded while the runs stand still behind the block,
        and are dropped before they go on. Close the generator (`contextlib.closing`) if an error may end its use.
        """
        if self._model.memory.limited and rounded:
            again, done = self._used_again(cancelled), set[str]()
            for wanted in self._groups_by_block({name: each for name, each in rounded.items() if name not in again}):
                with closing(handed_over(partial(self._run_by_block, wanted), cancelled)) as blocks:
                    for statistics in blocks:
                        if twice := done & statistics.keys():
                            raise _used_in_some(min(twice))
                        done.update(statistics)
                        yield statistics
                        statistics.clear()
            again = self._used_again(cancelled)
            rounded, on_run = (
                {name: each for name, each in rounded.items() if name in again and name not in done},
                ignore,
            )
        for group in self._groups(rounded):
            yield collect_statistics(self._model, self.inputs, group, self._behavior, on_run, cancelled)

    def _run_by_block(
        self,
        wanted: Mapping[str, Statistic],
        give: Callable[[dict[str, WeightStatistics]], None],
        cancelled: IsCancelled,
    ) -> None:
        batches = self.inputs.batches
        if not statistics_by_block(self._model, batches, wanted, self._behavior, give, cancelled):
            self._again = self._model.weights.keys()

    def _used_again(self, cancelled: IsCancelled) -> Set[str]:
        """Return the names of the weights that are used in several blocks, as in a layer that runs several times, or of all weights
        if sequences can't run side by side. The first call runs the model on the longest sequence.
        """
        if self._again is None:
            seen, again = set[str](), set[str]()

            def note(statistics: Mapping[str, WeightStatistics]) -> None:
                again.update(seen & statistics.keys())
                seen.update(statistics)
                for name, given in statistics.items():
                    self._channels[name] = len(next(iter(given.parts.values())).squares)

            longest = max(self.inputs.batches, key=lambda batch: batch.elements)
            wanted: dict[str, Statistic] = dict.fromkeys(self._model.weights, "squares")
            runs_apart = not statistics_by_block(self._model, [longest], wanted, self._behavior, note, cancelled)
            self._again = self._model.weights.keys() if runs_apart else again
        return self._again

    def _groups_by_block(self, rounded: Mapping[str, str]) -> Iterator[dict[str, Statistic]]:
        """Yield the weights in groups, of which each has as many weights of every block as fit in memory: usually one group."""
        blocks = self._model.memory.blocks
        of_block = defaultdict[str, dict[str, str]](dict)
        for name, dtype in rounded.items():
            self._refuse_too_large(name, dtype)
            of_block[next((block for block in blocks if name.startswith(f"{block}.")), "")][name] = dtype
        for groups in zip_longest(*map(self._groups, of_block.values()), fillvalue=dict[str, Statistic]()):
            yield {name: need for group in groups for name, need in group.items()}

    def _refuse_too_large(self, name: str, dtype: str) -> None:
        most, nbytes = self._model.memory.most * BLOCKS, self._most_bytes(name)
        if ROUNDINGS[dtypes.BY_NAME[dtype].rounding].needs == "products" and nbytes > most:
            raise UserError(
                f"{printable(name)} can't be rounded to {dtype} with {human_bytes(most)} of memory: the products of its inputs "
                f"take up to {human_bytes(nbytes)}; use {dtypes.unrounded(dtype)}:imatrix, or allow more with --max-memory"
            )

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
        """Return the most bytes that the products of a weight's inputs take. If it is not known which dimension has the input
        channels, it is the longest one.
        """
        shape = self._model.weights[name].stored.shape
        count = shape[0] if len(shape) > 2 else 1
        return 4 * count * (self._channels.get(name) or max(shape[-2:], default=0)) ** 2


def _used_in_some(name: str) -> UserError:
    return UserError(
        f"{printable(name)} can't be rounded: some calibration sequences use it in several blocks, and the longest one in a single "
        "block. Leave out the former, or run the model in memory"
    )
