"""Chooses the codes of weights in dtypes with roundings such as GPTQ, by runs of the model on its calibration inputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dtype_engine.core import dtypes
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.numerics.roundings import RoundedCodes, WeightStatistics, rounded_codes


class InputsOfWeights(Protocol):
    """Runs a model on its calibration inputs, and collects statistics of what its weights are multiplied with."""

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences for the user, such as where statistics were read instead of collected."""

    def runs(self, rounded: Mapping[str, str]) -> int:
        """Return how many runs over one sequence `collect` makes."""

    def collect(
        self, rounded: Mapping[str, str], on_run: Callable[[], None], cancelled: IsCancelled
    ) -> Iterator[dict[str, WeightStatistics]]:
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
    _kept: OrderedDict[_Key, RoundedCodes] = field(default_factory=OrderedDict)
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
        Raises UserError if the model has no calibration inputs, or one of the weights is not in memory.
        """
        for name, dtype in rounded.items():
            if self.weights[name].blockwise:
                raise UserError(
                    f"{name} can't be rounded to {dtype} in a model that is run from the disk: use {dtypes.unrounded(dtype)}"
                )
            if self.calibration is None:
                raise UserError(
                    f"{name} can't be rounded to {dtype} without inputs: {self.title} has none that it can be run on"
                )
        return self.calibration if rounded else None

    def runs(self, unknown: Mapping[str, str]) -> int:
        """Return how many calibration runs over one sequence `groups` makes."""
        return self.calibration.runs(unknown) if self.calibration is not None and unknown else 0

    def groups(
        self, pending: Sequence[str], unknown: Mapping[str, str], step: Callable[[], None], cancelled: IsCancelled
    ) -> Iterator[tuple[list[str], Mapping[str, WeightStatistics]]]:
        """Yield the names of the weights to cast with the statistics of their inputs: first those for which none are needed (which
        are not in `unknown`), last those that no product used. step: called after each calibration run of one sequence.
        """
        yield [name for name in pending if name not in unknown], {}
        calibration, rest = self.need_calibration(unknown), dict(unknown)
        for statistics in calibration.collect(unknown, step, cancelled) if calibration is not None else ():
            yield list(statistics), statistics
            for name in statistics:
                rest.pop(name, None)
        self._unused.update(rest)
        yield list(rest), {}

    def rounded(
        self, name: str, dtype: str, sharing: Sequence[Weight], statistics: Mapping[str, WeightStatistics]
    ) -> RoundedCodes | None:
        """Return what a rounding chooses for a weight in `dtype`, or None without a rounding or statistics. sharing: the weights
        that share its tensor scale.
        """
        key = name, dtype, tuple(each.info.name for each in sharing)
        kept = self._known(key)
        if kept is None and name in statistics:
            weight, amax = self.weights[name], max((each.amax for each in sharing), default=None)
            kept = rounded_codes(weight.stored.read(weight.tensor.device), dtype, statistics[name], amax)
            self._keep(key, kept)
        return kept

    def round_ahead(
        self, rounded: Mapping[str, str], shares: Mapping[str, Sequence[str]], cancelled: IsCancelled
    ) -> set[str]:
        """Round weights that are to be cast one after another, so that each cast need not run the calibration inputs. Returns the
        names of the weights that a matrix product uses; all others have the nearest values. rounded: their new dtypes by name.
        shares: as for `LiveModel.apply`. Raises NoForward, KernelError, Cancelled, and what `need_calibration` raises.
        """
        calibration, found = self.need_calibration(rounded), set[str]()
        for statistics in calibration.collect(rounded, ignore, cancelled) if calibration is not None else ():
            for name in statistics:
                if cancelled():
                    raise Cancelled
                sharing = [self.weights[each] for each in shares.get(name, ())]
                self.rounded(name, rounded[name], sharing, statistics)
                found.add(name)
        return found

    def _known(self, key: _Key) -> RoundedCodes | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def _keep(self, key: _Key, made: RoundedCodes) -> None:
        self._kept[key] = made
        self._nbytes += made.nbytes
        while self._nbytes > self.budget and len(self._kept) > 1:
            self._nbytes -= self._kept.popitem(last=False)[1].nbytes
