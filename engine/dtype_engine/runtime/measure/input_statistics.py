"""Collects the statistics of layers' inputs that roundings need, in reference runs over calibration inputs."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.options import RunSettings
from dtype_engine.core.roundings import Statistic
from dtype_engine.runtime.inputs import Batch, Inputs
from dtype_engine.runtime.libraries.torch_private import WithoutModes
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.modes.activations import Product, WeightProducts, operand_of
from dtype_engine.runtime.modes.op_tables import Arguments
from dtype_engine.runtime.modes.reference import ReferenceMode
from dtype_engine.runtime.numerics.roundings import InputStatistics, WeightStatistics
from dtype_engine.runtime.passes.kept_positions import AttendedPositions, KeptPositions
from dtype_engine.runtime.passes.model_behavior import ModelBehavior
from dtype_engine.runtime.passes.runner import ForwardRunner

_GROUPED = ("_grouped_mm", "grouped_mm")


@dataclass(frozen=True, slots=True)
class _Part:
    """A weight, or what it holds at one index of its first dimension, such as an expert."""

    weight: str
    index: int | None = None


@dataclass(slots=True)
class _Sums:
    """The sums over the inputs of one part of a weight."""

    across: int
    squares: torch.Tensor
    products: torch.Tensor | None
    tokens: int = 0

    def add(self, values: torch.Tensor, squares: torch.Tensor, products: torch.Tensor | None) -> None:
        self.squares += squares
        if self.products is not None and products is not None:
            self.products += products
        self.tokens += len(values)

    def means(self) -> InputStatistics:
        return InputStatistics(
            self.squares / self.tokens, None if self.products is None else self.products.div_(self.tokens), self.tokens
        )


@dataclass(slots=True)
class _Totals:
    """The sums over the inputs of weights. Passes that take turns share them."""

    sums: dict[_Part, _Sums] = field(default_factory=dict)
    last: tuple[weakref.ref[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
    """The input that came last, and what `_Observer` has computed from it."""

    def take(self) -> dict[str, WeightStatistics]:
        """Return the statistics by the weights' names, and begin again."""
        found: dict[str, dict[int | None, InputStatistics]] = {}
        across: dict[str, int] = {}
        for part, each in self.sums.items():
            found.setdefault(part.weight, {})[part.index] = each.means()
            across[part.weight] = each.across
        self.sums, self.last = {}, None
        return {name: WeightStatistics(across[name], parts) for name, parts in found.items()}


@dataclass
class _Observer(WeightProducts[_Part]):
    """Adds up the inputs of every product with a weight in `needs`, and leaves them as they are."""

    needs: Mapping[str, Statistic]
    totals: _Totals
    kept: KeptPositions | None = None
    module: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def apply(
        self,
        name: str,
        args: Arguments,
        kwargs: dict[str, Any],
        product: Product[_Part],
        dtype: torch.dtype | None = None,
    ) -> tuple[Arguments, dict[str, Any], torch.Tensor]:
        given: torch.Tensor = operand_of(name, args, kwargs, product.operand)
        weight: torch.Tensor = operand_of(name, args, kwargs, 1 - product.operand)
        across = 1 if weight.stride(product.of_weight) == 1 else 0
        with WithoutModes():
            if product.form.index is None and weight.ndim > 2:
                self._add_experts(name, given, product, across, kwargs.get("offs"))
            else:
                self._add(product.form, given, product.dim, across)
        return args, kwargs, given

    def _add_experts(
        self, name: str, given: torch.Tensor, product: Product[_Part], across: int, ends: torch.Tensor | None
    ) -> None:
        """Add the inputs of a product with all experts at once: rows in groups that end at `ends`, or a matrix for each expert."""
        if name in _GROUPED and ends is not None:
            starts = [0, *ends.tolist()]
            parts = [given[start:end] for start, end in itertools.pairwise(starts)]
        elif given.ndim == 3:
            parts = list(given)
        else:
            return
        for index, part in enumerate(parts):
            self._add(replace(product.form, index=index), part, product.dim, across)

    def _add(self, part: _Part, given: torch.Tensor, dim: int, across: int) -> None:
        if not given.numel():
            return
        values, squares, products = self._statistics(given, dim, self.needs[part.weight] == "products")
        if (sums := self.totals.sums.get(part)) is None:
            channels = values.shape[-1]
            matrix = None if products is None else values.new_zeros(channels, channels)
            sums = self.totals.sums[part] = _Sums(across, values.new_zeros(channels), matrix)
        sums.add(values, squares, products)

    def _statistics(
        self, given: torch.Tensor, dim: int, with_products: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return (inputs [tokens, channels], the sums of their squares and of their products). What the last layer got, such as q
        before k and v, is not computed again.
        """
        last = self.totals.last
        if last is not None and last[0]() is given and (last[3] is not None or not with_products):
            return last[1:]
        values = given.detach().movedim(dim, -1)
        kept = None if self.kept is None else self.kept.of_module(self.module, 0, values)
        values = values[kept.to(values.device)] if kept is not None else values.reshape(-1, values.shape[-1])
        values = values.float()
        squares = values.square().sum(0)
        products = values.T @ values if with_products else None
        self.totals.last = weakref.ref(given), values, squares, products
        return values, squares, products


class _StatisticsMode(ReferenceMode):
    """Runs the reference, and shows the inputs of products with weights to an observer."""

    def __init__(self, model: LiveModel, observer: _Observer) -> None:
        super().__init__(model.by_id, model.device)
        self.observer = self.rounding = observer

    def input_format(self, weight: Weight) -> _Part | None:
        return _Part(weight.info.name) if weight.info.name in self.observer.needs else None

    def run(self, func: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
        self.observer.module = self.module
        output = super().run(func, name, args, kwargs)
        if name == "__getitem__" and isinstance(output, torch.Tensor):
            self._note_index(args[0], args[1], output)
        return output

    def _note_index(self, table: torch.Tensor, index: Any, output: torch.Tensor) -> None:
        part = self.observer.formats([output], {}).get(id(output))
        if isinstance(index, torch.Tensor) and not index.ndim and not index.is_floating_point():
            index = int(index)
        if part is not None and part.index is None and table.ndim > 2 and type(index) is int:
            self.observer.label(output, replace(part, index=index % len(table)))


def collect_statistics(
    model: LiveModel,
    inputs: Inputs,
    wanted: Mapping[str, Statistic],
    behavior: ModelBehavior,
    on_run: Callable[[], object],
    cancelled: IsCancelled,
) -> dict[str, WeightStatistics]:
    """Run the reference over calibration inputs, and return the statistics of the inputs of weights, by the weights' names. Weights
    that no matrix product used are left out. Positions that a mask of the inputs leaves out do not count.

    wanted: what is needed for each weight, by its name. behavior: what earlier passes have shown about the model. on_run:
    called after each sequence. Raises NoForward, KernelError, Cancelled.
    """
    totals = _Totals()
    with ForwardRunner(model, RunSettings(), cancelled, behavior=behavior) as runner:
        runner.side_by_side([partial(_observe, runner, batch, wanted, totals, on_run) for batch in inputs.batches])
    return totals.take()


def statistics_by_block(
    model: LiveModel,
    batches: Sequence[Batch],
    wanted: Mapping[str, Statistic],
    behavior: ModelBehavior,
    give: Callable[[dict[str, WeightStatistics]], object],
    cancelled: IsCancelled,
) -> bool:
    """Run the reference of a model larger than memory over batches side by side, and give the statistics of each block's weights to
    `give` when all of them have run the block, while its weights are still in memory. `give` may drop them: memory then holds the
    statistics of one block at a time. A weight that a later block uses again is given again, with its inputs there alone.

    The other arguments and errors are those of `collect_statistics`. Returns False, perhaps after a part was given, if the
    sequences can't run side by side.
    """
    totals = _Totals()

    def end_block() -> None:
        with WithoutModes():
            statistics = totals.take()
        if statistics:
            give(statistics)

    def observe(batch: Batch) -> None:
        if runner.takes_turns:
            _observe(runner, batch, wanted, totals, ignore)

    with ForwardRunner(model, RunSettings(), cancelled, behavior=behavior) as runner:
        runner.side_by_side([partial(observe, batch) for batch in batches], end_block)
        return runner.takes_turns


def _observe(
    runner: ForwardRunner,
    batch: Batch,
    wanted: Mapping[str, Statistic],
    totals: _Totals,
    on_run: Callable[[], object],
) -> None:
    """Run the reference over a batch, and add up the inputs of the weights in `wanted`."""
    model = runner.model
    kept = KeptPositions.of(model.module, batch, model.device, AttendedPositions())
    moved = runner.reference_batch(batch)
    runner.under(_StatisticsMode(model, _Observer(wanted, totals, kept)), partial(moved.run, model.module))
    on_run()
