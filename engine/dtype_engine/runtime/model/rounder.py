"""Chooses the codes of weights in dtypes with roundings such as GPTQ, by runs of the model on its calibration inputs."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

from dtype_engine.core import dtypes
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.results.losses import ValueLoss, total
from dtype_engine.runtime.device import enough_memory
from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.numerics.overflow_underflow import all_losses
from dtype_engine.runtime.numerics.roundings import RoundedCodes, WeightStatistics, rounded_codes
from dtype_engine.runtime.weights.kept_codes import KeptCodes, keep_codes, nbytes_kept
from dtype_engine.runtime.weights.temporary_file import TemporaryFile


class InputsOfWeights(Protocol):
    """Runs a model on its calibration inputs, and collects statistics of what its weights are multiplied with."""

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences for the user, such as where statistics were read instead of collected."""

    def runs(self, rounded: Mapping[str, str]) -> int:
        """Return how many runs over one sequence `collect` makes."""

    def collect(
        self, rounded: Mapping[str, str], on_run: Callable[[], None], cancelled: IsCancelled
    ) -> Generator[dict[str, WeightStatistics]]:
        """Yield the statistics of as many weights at a time as fit in memory, by name. rounded: the weights' new dtypes by name."""


_Key = tuple[str, str, tuple[str, ...]]
"""(The name of a weight, its dtype, the names of the weights that share its tensor scale.)"""


@dataclass
class Rounder:
    """Rounds the weights of one model. What it chose is kept, so that undoing a cast and casting again takes no further runs."""

    weights: Mapping[str, Weight]
    title: str
    """The name of the model, for messages."""
    budget: int
    """The number of bytes beyond which the codes that were not used for the longest time are dropped."""
    calibration: InputsOfWeights | None = None
    """Runs the model on its calibration inputs. None if it has none."""
    over_memory: bool = False
    """Whether the model is larger than memory. The codes of its weights are then in a temporary file."""
    _kept: OrderedDict[_Key, RoundedCodes] = field(default_factory=OrderedDict)
    _in_file: dict[_Key, KeptCodes] = field(default_factory=dict)
    _nbytes: int = 0
    _unused: set[str] = field(default_factory=set)
    """The names of weights that no matrix product used in the runs, which keep the nearest values."""

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences for the user on the statistics by which weights were rounded."""
        return () if self.calibration is None else self.calibration.notices

    def unknown(self, pending: Mapping[str, str], shared: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
        """Return the new dtypes, by name, of the weights that are to be rounded by statistics that are not known. pending: the new
        dtypes of all weights to cast. shared: the names of the weights that share a tensor scale, by the name of each. Raises what
        `need_calibration` raises.
        """
        found = {
            name: dtype
            for name, dtype in pending.items()
            if dtypes.has_rounding(dtype)
            and name not in self._unused
            and self._known((name, dtype, shared.get(name, ()))) is None
        }
        self.need_calibration(found)
        return found

    def need_calibration(self, rounded: Mapping[str, str]) -> InputsOfWeights | None:
        """Return what collects the statistics for new dtypes with roundings (`rounded`, by weight name), or None if there are none.
        Raises UserError if the model has no calibration inputs.
        """
        if rounded and self.calibration is None:
            name, dtype = next(iter(rounded.items()))
            raise UserError(
                f"{name} can't be rounded to {dtype} without inputs: {self.title} has none that it can be run on"
            )
        return self.calibration if rounded else None

    def runs(self, unknown: Mapping[str, str]) -> int:
        """Return how many steps `groups` counts: its calibration runs over one sequence, and weights that it rounds itself."""
        if self.calibration is None or not unknown:
            return 0
        return self.calibration.runs(unknown) + (len(unknown) if self.over_memory else 0)

    def groups(
        self,
        pending: Sequence[str],
        unknown: Mapping[str, str],
        shared: Mapping[str, Sequence[str]],
        step: Callable[[], None],
        cancelled: IsCancelled,
    ) -> Iterator[tuple[list[str], Mapping[str, WeightStatistics]]]:
        """Yield the names of the weights to cast with the statistics of their inputs: first those for which none are needed (which
        are not in `unknown`), last those that no product used. If the model is larger than memory, the weights are rounded before
        they are yielded, without statistics. shared: as for `unknown`. step: called after each step that `runs` counts.
        """
        yield [name for name in pending if name not in unknown], {}
        rest = dict(unknown)
        if self.over_memory:
            found = self.round_ahead(unknown, shared, cancelled, step)
            yield list(found), {}
            rest = {name: dtype for name, dtype in unknown.items() if name not in found}
            for _ in rest:
                step()
        else:
            calibration = self.need_calibration(unknown)
            for statistics in calibration.collect(unknown, step, cancelled) if calibration is not None else ():
                yield list(statistics), statistics
                for name in statistics:
                    rest.pop(name, None)
        self._unused.update(rest)
        yield list(rest), {}

    def rounded(
        self, name: str, dtype: str, sharing: Sequence[Weight], statistics: Mapping[str, WeightStatistics]
    ) -> RoundedCodes | KeptCodes | None:
        """Return what a rounding chooses for a weight in `dtype`, or None without a rounding or statistics. sharing: the weights
        that share its tensor scale.
        """
        key = name, dtype, tuple(each.info.name for each in sharing)
        kept = self._known(key)
        if kept is None and name in statistics:
            weight = self.weights[name]
            if weight.blockwise:
                kept = self._in_file[key] = self._rounded_in_file(weight, dtype, sharing, statistics[name])
            else:
                stored = weight.stored.read(weight.tensor.device)
                kept = rounded_codes(stored, dtype, statistics[name], weight.scale_amax(dtype, sharing))
                self._keep(key, kept)
        return kept

    def _rounded_in_file(
        self, weight: Weight, dtype: str, sharing: Sequence[Weight], given: WeightStatistics
    ) -> KeptCodes:
        losses = list[ValueLoss]()

        def rounded() -> Iterator[RoundedCodes]:
            for stored, _, made in weight.rounded_parts(dtype, given, weight.scale_amax(dtype, sharing)):
                losses.append(all_losses(weight.info.name, stored, dtype, made.codes))
                yield made

        kept = keep_codes(self.file, dtype, weight.stored.shape, rounded(), for_export=True)
        return dataclasses.replace(kept, loss=loss if (loss := total(losses)).is_listed else None)

    @functools.cached_property
    def file(self) -> TemporaryFile:
        """The file for the codes of weights that stay on the disk."""
        file = TemporaryFile()
        weakref.finalize(self, file.close)
        return file

    def round_ahead(
        self,
        rounded: Mapping[str, str],
        shares: Mapping[str, Sequence[str]],
        cancelled: IsCancelled,
        step: Callable[[], None] = ignore,
    ) -> set[str]:
        """Round weights that are to be cast one after another, so that each cast need not run the calibration inputs. Returns the
        names of the weights that a matrix product uses; all others have the nearest values. rounded: their new dtypes by name.
        shares: as for `LiveModel.apply`. step: called after each run and each weight. Raises NoForward, KernelError, Cancelled,
        what `need_calibration` raises, and UserError if a temporary file can't be written.
        """
        calibration, found = self.need_calibration(rounded), set[str]()
        if calibration is None:
            return found
        blockwise = {name: dtype for name, dtype in rounded.items() if self.weights[name].blockwise}
        if blockwise:
            self.file.need(sum(nbytes_kept(self.weights[name].stored.shape, each) for name, each in blockwise.items()))
        with closing(calibration.collect(rounded, step, cancelled)) as collected:
            for statistics in collected:
                for name in statistics:
                    if cancelled():
                        raise Cancelled
                    sharing = [self.weights[each] for each in shares.get(name, ())]
                    with enough_memory(f"{name} in {rounded[name]}", self.weights[name].tensor.device):
                        self.rounded(name, rounded[name], sharing, statistics)
                    found.add(name)
                    step()
        return found

    def _known(self, key: _Key) -> RoundedCodes | KeptCodes | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key) or self._in_file.get(key)

    def _keep(self, key: _Key, made: RoundedCodes) -> None:
        self._kept[key] = made
        self._nbytes += made.nbytes
        while self._nbytes > self.budget and len(self._kept) > 1:
            self._nbytes -= self._kept.popitem(last=False)[1].nbytes
