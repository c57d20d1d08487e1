"""Rounds the weights of a scan to dtypes with a rounding (`core.roundings`), once for all sequences.

Local errors are computed in every sequence, and for a large weight some rows at a time. A rounding such as GPTQ needs the whole
weight and the statistics of its layer's inputs, so its codes and scales are made before the first sequence, with reference runs
over the calibration inputs, and written to a temporary file: a byte for each value, and a float32 for each scale.

The statistics also tell by how much a rounding lowers the error of a layer's output: `RoundingGain.gain`.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from dtype_engine.core import dtypes
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.core.roundings import ROUNDINGS
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.recipe.plan import dtype_given
from dtype_engine.runtime.device import enough_memory
from dtype_engine.runtime.formats.dequantize import dequantize, dequantized_rows, torch_dtype
from dtype_engine.runtime.formats.row_blocks import stopping
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.model.weight import Weight, sharing
from dtype_engine.runtime.numerics.quantize import values_in
from dtype_engine.runtime.numerics.roundings import InputStatistics, RoundedCodes, WeightStatistics, output_error
from dtype_engine.runtime.scan.routing import Key
from dtype_engine.runtime.weights.kept_codes import KeptCodes, keep_codes
from dtype_engine.runtime.weights.temporary_file import StoredVector, TemporaryFile


@dataclass(frozen=True, slots=True)
class RoundingGain:
    """What a rounding does to one weight in one dtype."""

    gain: float | None
    """The mean squared error of the layer's output with the nearest values, divided by that with the rounded ones, over the
    calibration inputs, whose channels count as uncorrelated if the rounding needs only their squares. None if no matrix product
    uses the weight, which then has the nearest values.
    """
    unseen: int = 0
    """How many of the weight's matrices, such as experts, got too few calibration inputs and have the nearest values."""


RoundingGains = Mapping[Key, RoundingGain]


@dataclass(frozen=True, slots=True)
class SharedRoundings:
    """Where another process of this machine finds what this one has rounded: a file, and the place of its index there."""

    path: str
    start: int
    nbytes: int
    digest: str
    """The SHA-256 of the index, by which a process knows that the file is the right one."""


class ScannedRoundings:
    """The codes and scales of weights in dtypes with a rounding. wanted: the dtypes of each weight. A type of llama.cpp that the
    weight can't have counts as the one that replaces it, and a dtype without a rounding is left out. keeps: whether the codes and
    scales are kept, or only what the roundings did.
    """

    def __init__(self, model: LiveModel, wanted: Mapping[str, Sequence[str]], keeps: bool = True) -> None:
        self.model = model
        self._keeps = keeps
        self.wanted: dict[str, tuple[str, ...]] = {}
        for name, weight in model.weights.items():
            given = dict.fromkeys(dtype_given(weight.info, each) for each in wanted.get(name, ()))
            if those := tuple(each for each in given if each in dtypes.BY_NAME and dtypes.BY_NAME[each].rounding):
                self.wanted[name] = those
        self.roundings: dict[Key, RoundingGain] = {}
        """What the roundings did, for each weight and dtype that is done."""
        self._kept: dict[Key, KeptCodes] = {}
        self._file: TemporaryFile | None = None

    def __contains__(self, key: Key) -> bool:
        """Return whether a (weight, dtype) has other values than the nearest ones."""
        return key in self._kept

    def make(self, on_progress: Callable[[int, int], object], cancelled: IsCancelled) -> float:
        """Round all weights that are not rounded yet. Returns how many seconds it took. on_progress: called with the numbers of
        finished steps and of all, which are calibration runs and casts. Raises UserError if the model has no calibration inputs, or
        if the file can't be written. Raises NoForward, KernelError, Cancelled; a later call continues.
        """
        left: dict[str, list[str]] = {
            name: missing
            for name, those in self.wanted.items()
            if (missing := [each for each in those if (name, each) not in self.roundings])
        }
        asked = {name: max(those, key=_needs_products) for name, those in left.items()}
        calibration = self.model.rounder.need_calibration(asked)
        if calibration is None:
            return 0.0
        started, done = time.perf_counter(), 0
        total = calibration.runs(asked) + sum(map(len, left.values()))

        def step() -> None:
            nonlocal done
            done += 1
            on_progress(done, total)

        with closing(calibration.collect(asked, step, cancelled)) as collected:
            for statistics in collected:
                for name, given in statistics.items():
                    self._round_in(left[name], name, given, step, cancelled)
        for name, those in left.items():
            for dtype in those:
                self.roundings.setdefault((name, dtype), RoundingGain(None))
        return time.perf_counter() - started

    def values(self, name: str, dtype: str, rows: slice | None, compute: torch.dtype) -> torch.Tensor:
        """Return the values of a weight in the dtype `compute`: of the indexes `rows` of its first dimension, or all if it is None.
        `rows` may split no block. (name, dtype) must be among the rounded ones.
        """
        kept = self._kept[name, dtype]
        if len(kept.shape) < 2:
            values = dequantize(*kept.read(), compute, dtypes.BY_NAME[dtype].blocks)
            return values if rows is None else values[rows]
        return dequantize(*kept.read(rows), compute, dtypes.BY_NAME[dtype].blocks)

    def look_up(self, name: str, dtype: str, ids: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
        """Return the rows `ids` of an embedding table [rows, width] in the dtype `compute`: [*ids.shape, width]. (name, dtype) must
        be among the rounded ones.
        """
        codes, scale = self._kept[name, dtype].read()
        return dequantized_rows(codes, scale, dtype, ids, compute)

    def share(self) -> SharedRoundings | None:
        """Return where other processes find the codes, or None if they can't open the file."""
        if self._file is None or (path := self._file.path) is None:
            return None
        rows = []
        for key, each in self.roundings.items():
            kept = self._kept.get(key)
            places = None if kept is None else [kept.codes.start, kept.scale.start, list(kept.grid)]
            rows.append([*key, each.gain, each.unseen, places])
        index = json.dumps(rows).encode()
        written = self._file.put(torch.frombuffer(bytearray(index), dtype=torch.uint8))
        return SharedRoundings(path, written.start, len(index), hashlib.sha256(index).hexdigest())

    def use(self, shared: SharedRoundings) -> None:
        """Take what another process has rounded, unless this one has rounded weights itself. Changes nothing if the file is not
        there.
        """
        if self.roundings:
            return
        try:
            file = TemporaryFile(path=shared.path)
        except OSError:
            return
        self._hold(file)
        try:
            place = StoredVector(shared.start, shared.nbytes, torch.uint8, torch.device("cpu"))
            index = file.take(place).numpy().tobytes()
        except UserError:
            index = b""
        if hashlib.sha256(index).hexdigest() != shared.digest:
            self.close()
            return
        for name, dtype, gain, unseen, places in json.loads(index):
            self.roundings[name, dtype] = RoundingGain(gain, unseen)
            if places is not None:
                weight, (codes, scale, grid) = self.model.weights[name], places
                device, count = weight.tensor.device, weight.stored.numel()
                self._kept[name, dtype] = KeptCodes(
                    file,
                    dtype,
                    weight.stored.shape,
                    StoredVector(codes, count, torch_dtype(dtype), device),
                    StoredVector(scale, math.prod(grid), torch.float32, device),
                    tuple(grid),
                )

    def _hold(self, file: TemporaryFile) -> None:
        self._file = file
        weakref.finalize(self, file.close)

    def close(self) -> None:
        """Remove the file. A later call of `make` rounds the weights again."""
        if self._file is not None:
            self._file.close()
        self._file = None
        self._kept.clear()
        self.roundings = {}

    def _round_in(
        self,
        targets: Sequence[str],
        name: str,
        given: WeightStatistics,
        step: Callable[[], None],
        cancelled: IsCancelled,
    ) -> None:
        for dtype in targets:
            if cancelled():
                raise Cancelled
            with stopping(cancelled), enough_memory(f"{name} in {dtype}", self.model.device):
                self.roundings[name, dtype] = self._round(name, dtype, given)
            step()

    def _round(self, name: str, dtype: str, given: WeightStatistics) -> RoundingGain:
        weight = self.model.weights[name]
        if not _matrices_with_inputs(given, len(weight.stored.shape)):
            return RoundingGain(None)
        amax = weight.scale_amax(dtype, sharing(self.model.weights, name, dtype))
        products, errors, unseen = _needs_products(dtype), [0.0, 0.0], 0

        def rounded() -> Iterator[RoundedCodes]:
            nonlocal unseen
            for stored, inputs, made in weight.rounded_parts(dtype, given, amax):
                yield made
                nearest = values_in(stored, dtypes.unrounded(dtype), torch.float32, amax)
                chosen = dequantize(made.codes, made.scale, torch.float32, dtypes.BY_NAME[dtype].blocks)
                errors[0] += _error(nearest, stored, inputs, products)
                errors[1] += _error(chosen, stored, inputs, products)
                unseen += len(made.nearest)

        if self._keeps:
            self._keep(name, dtype, rounded())
        else:
            deque(rounded(), maxlen=0)  # only the errors count
        return RoundingGain(_ratio(*errors), unseen)

    def _keep(self, name: str, dtype: str, made: Iterable[RoundedCodes]) -> None:
        if self._file is None:
            self._hold(TemporaryFile(instead="scan fewer dtypes"))
        assert self._file is not None
        shape = self.model.weights[name].stored.shape
        self._kept[name, dtype] = keep_codes(self._file, dtype, shape, made, for_export=False)


def _matrices_with_inputs(given: WeightStatistics, ndim: int) -> dict[int | None, InputStatistics]:
    """Return the statistics of the matrices of a weight with `ndim` dimensions, by index. A weight of more than two dimensions that
    a product uses as one matrix has none.
    """
    return {index: inputs for index, inputs in given.parts.items() if (index is None) == (ndim < 3)}


def _needs_products(dtype: str) -> bool:
    """Return whether a dtype's rounding needs the products of inputs, and not only their squares."""
    return ROUNDINGS[dtypes.BY_NAME[dtype].rounding].needs == "products"


def _error(values: torch.Tensor, stored: torch.Tensor, given: WeightStatistics, products: bool) -> float:
    """Return the squared error that new values of a weight cause in the outputs of its layer, summed over outputs and calibration
    inputs: tr(D H Dᵀ), where D is the difference. products: whether H has all products of the inputs, or only the squares, so that
    a gain does not depend on what else the statistics were collected for.
    """
    total = 0.0
    for index, inputs in _matrices_with_inputs(given, stored.ndim).items():
        new, old = (values, stored) if index is None else (values[index], stored[index])
        difference = (new - old.float()).reshape(-1, new.shape[-1])
        if products and inputs.products is not None:
            errors = output_error(difference, inputs.products, given.across)
        else:
            errors = difference.square() * (inputs.squares if given.across == 1 else inputs.squares[:, None])
        total += inputs.tokens * float(errors.double().sum())
    return total


def _ratio(nearest: float, rounded: float) -> float:
    """Return the gain of a rounding from two errors. It is 1 if the weight has values that are not finite, since it then has the
    nearest values.
    """
    if not (math.isfinite(nearest) and math.isfinite(rounded)):
        return 1.0
    if rounded <= 0:
        return math.inf if nearest > 0 else 1.0
    return nearest / rounded


def gain_of(roundings: RoundingGains, weights: Mapping[str, Weight], name: str, dtype: str) -> float | None:
    """Return the gain of a rounding, or None if the dtype has none or the weight has the nearest values. weights: all weights of
    the model, by name.
    """
    found = roundings.get((name, dtype_given(weights[name].info, dtype))) if name in weights else None
    return None if found is None else found.gain


def nearest_notices(roundings: RoundingGains, weights: Mapping[str, Weight]) -> tuple[str, ...]:
    """Return a sentence for the matrices that have the nearest values although their dtype has a rounding, and one for the experts
    that do. There is none if there are no such weights.
    """
    plain = dict.fromkeys(
        name for (name, _), each in roundings.items() if each.gain is None and len(weights[name].info.shape) > 1
    )
    found = []
    if plain:
        found.append(
            f"{plural(len(plain), 'weight')}, first {printable(next(iter(plain)))}, scored with the nearest values: a rounding "
            "needs a layer's inputs, and no matrix product of the calibration inputs uses them"
        )
    unseen = {name: each.unseen for (name, _), each in roundings.items() if each.unseen}
    if unseen:
        found.append(
            f"{plural(sum(unseen.values()), 'expert')} got too few calibration tokens, first in {printable(next(iter(unseen)))}: "
            "scored with the nearest values"
        )
    return tuple(found)
