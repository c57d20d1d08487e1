"""Computes local errors: the output of an operation with one of its weights in a lower dtype, minus its output in the reference
run. All other arguments are those of the reference run.

There is one exception, for an operation with several weights and a compute dtype such as bfloat16: the local error of the
smallest weight is the output with all weights cast, minus the output with all but this weight cast (see `companions`).
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from dtype_engine.core import dtypes
from dtype_engine.recipe.plan import dtype_given
from dtype_engine.runtime.formats.dequantize import dtype_name, torch_dtype
from dtype_engine.runtime.model.weight import Weight, sharing
from dtype_engine.runtime.modes.activations import ActivationRounding
from dtype_engine.runtime.modes.op_tables import is_in_place, replace_tensors, takes_rows, tensors_in
from dtype_engine.runtime.modes.promotion import call_mixed
from dtype_engine.runtime.modes.reference import reference_dtype
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.numerics.activations import InputFormat
from dtype_engine.runtime.numerics.quantize import values_in
from dtype_engine.runtime.scan.companions import companions_of
from dtype_engine.runtime.scan.scanned_roundings import ScannedRoundings
from dtype_engine.runtime.scan.weight_ops import WeightOp, WeightOrigin
from dtype_engine.runtime.weights.source import PlainSource, WeightSource

# Products of two 16-bit numbers are exact in float32, and kernels sum them in float32 and round once at the end. On a CPU without
# 16-bit instructions, a 16-bit kernel takes eight times as long as a float32 kernel with rounding before and after it.
PRODUCTS = frozenset(
    {
        "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d",
        "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "_grouped_mm", "grouped_mm",
    }
)  # fmt: skip
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
PIECE = 1 << 24
"""A linear operation with a larger weight is rerun with some rows of the weight at a time, which have about this many elements. The
number does not depend on the free memory, because the last bits of a product may depend on it.
"""
_ROWS = 128
"""A piece has a multiple of this number of rows, which is itself a multiple of the rows of a block in every block format."""


@dataclass(eq=False)
class LocalErrors:
    """Reruns operations of the reference run with one of their weights cast."""

    weights: Mapping[str, Weight]
    compute: torch.dtype
    budget: int
    """The maximum number of bytes of cast weights that are kept for later operations."""
    rounds: bool = False
    """Whether to also round the activations that are multiplied by a quantized weight."""
    rounded: ScannedRoundings | None = None
    """The values of weights in dtypes with a rounding such as GPTQ, which choose values by the inputs of a layer."""

    def __post_init__(self) -> None:
        self.rounding = ActivationRounding() if self.rounds else None
        self._cast: OrderedDict[tuple[str, str, int | None], torch.Tensor] = OrderedDict()
        self._held = 0
        self._decoded: tuple[WeightSource, slice | None, torch.Tensor] | None = None
        """What the last cast in the running operation decoded, for its next casts of the same weight: (source, rows, values)."""

    def of(self, operation: WeightOp, weight: str, names: Sequence[str]) -> list[torch.Tensor]:
        """Rerun an operation with `weight` in each of the dtypes `names`. Returns, for each output, the local errors [dtypes,
        elements] in the reference's dtype. Raises KernelError if the operation has no kernel for a dtype.
        """
        errors = [torch.empty((len(names), *before.shape), dtype=before.dtype, device=before.device)
                  for before in operation.outputs]  # fmt: skip
        with torch.no_grad():
            smallest, companions = companions_of(operation.weights, self.weights)
            for rows in _pieces(operation):
                part = (...,) if rows is None else (..., rows)
                alone = _Rerun(operation, (weight,), self, rows)
                for row, dtype in enumerate(self._computed_in(weight, name) for name in names):
                    befores, again = [before[part] for before in operation.outputs], alone
                    if companions and weight == smallest and dtype in dtypes.COMPUTE_DTYPES:
                        beside = _Rerun(operation, companions, self, rows).outputs(dtype)
                        if all(bool(torch.isfinite(tensor).all()) for tensor in beside):
                            befores, again = beside, _Rerun(operation, (weight, *companions), self, rows)
                    for error, before, after in zip(errors, befores, again.outputs(dtype), strict=True):
                        torch.sub(after.to(error.dtype), before.to(error.dtype), out=error[row][part])
        self._decoded = None
        return [error.flatten(1) if error.ndim > 1 else error[:, None] for error in errors]

    def stored(self, name: str, rows: slice | None) -> torch.Tensor:
        """Return a weight's values in the reference run, of all rows if `rows` is None."""
        weight = self.weights[name]
        return self._read(weight.reference, rows, weight.tensor.device).to(reference_dtype(weight))

    def _read(self, values: WeightSource, rows: slice | None, device: torch.device) -> torch.Tensor:
        """Return the values at the indexes `rows` of a weight's first dimension, or all values if `rows` is None."""
        if self._decoded is not None and self._decoded[0] is values and self._decoded[1] == rows:
            return self._decoded[2]
        self._decoded = None
        if rows is None:
            read = values.read(device)
        else:
            part = values.part(rows.start, device) if rows.stop == rows.start + 1 else None
            read = values.rows(rows.start, rows.stop, device) if part is None else part[None]
        if values.format:
            self._decoded = values, rows, read
        return read

    def _computed_in(self, name: str, dtype: str) -> str:
        """Return the dtype in which an operation uses a weight that is scanned in `dtype`: the one that a rule with `dtype` gives
        it or, if this is the format in which another program quantized the weight, the dtype to which the weight is decoded.
        """
        info, stored = self.weights[name].info, self.weights[name].stored
        decoded = dtype == info.dtype and not stored.plain and not stored.own
        return dtype_name(stored.holds) if decoded else dtype_given(info, dtype)

    def dtype_of(self, name: str, dtype: str) -> torch.dtype:
        """Return the torch dtype of what `cast` and `look_up` return."""
        dtype = self._computed_in(name, dtype)
        return reference_dtype(self.weights[name]) if dtype in dtypes.STORAGE_DTYPES else torch_dtype(dtype)

    def look_up(self, name: str, dtype: str, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows `ids` of an embedding table [rows, width] after a cast of the whole table: [*ids.shape, width]. Only
        these rows are cast, unless a block of the format has several rows.
        """
        dtype = self._computed_in(name, dtype)
        blocks = dtypes.BY_NAME[dtype].blocks
        if not ids.numel() or (blocks is not None and blocks.rows > 1):
            return functional.embedding(ids, self.cast(name, dtype))
        weight = self.weights[name]
        if self.rounded is not None and (name, dtype) in self.rounded:
            return self.rounded.look_up(name, dtype, ids, reference_dtype(weight))
        rows = weight.stored.gather(ids)
        values = values_in(
            rows.reshape(-1, rows.shape[-1]), dtype, reference_dtype(weight), self._amax(name, dtype, True)
        )
        return values.view(rows.shape)

    def _amax(self, name: str, dtype: str, in_parts: bool) -> float | None:
        """Return the |value| from which the scale of the whole tensor is computed: the largest of this weight and of those that
        runtimes fuse with it. Returns None if the format has no such scale. Also returns None for an unfused weight that is cast as
        a whole, because the cast then finds the value itself. in_parts: whether only some rows are cast, which may lack the largest
        value.
        """
        row = dtypes.BY_NAME[dtype]
        alone = in_parts and (row.per_tensor or (row.blocks is not None and row.blocks.tensor_scale))
        weights = sharing(self.weights, name, dtype) or ([self.weights[name]] if alone else [])
        return max((weight.amax for weight in weights), default=None)

    def cast(self, name: str, dtype: str, rows: slice | None = None) -> torch.Tensor:
        """Return a weight's values after a cast, dequantized. rows: a slice of the first dimension that splits no block, or None
        for all.
        """
        dtype = self._computed_in(name, dtype)
        blocks = dtypes.BY_NAME[dtype].blocks
        shape = self.weights[name].stored.shape
        if blocks is not None and blocks.rows > 1 and len(shape) > 2 and shape[-1] < blocks.columns:
            rows = None  # a block has values of several indexes of the first dimension
        key = (name, dtype, None if rows is None else rows.start)
        if key in self._cast:
            self._cast.move_to_end(key)
            return self._cast[key]
        weight = self.weights[name]
        if self.rounded is not None and (name, dtype) in self.rounded:
            values = self.rounded.values(name, dtype, rows, reference_dtype(weight))
        else:
            stored = self._read(weight.stored, rows, weight.tensor.device)
            values = values_in(stored, dtype, reference_dtype(weight), self._amax(name, dtype, rows is not None))
        self._cast[key] = values
        self._held += values.nbytes
        while self._held > self.budget and len(self._cast) > 1:
            _, oldest = self._cast.popitem(last=False)
            self._held -= oldest.nbytes
        return values


def _pieces(operation: WeightOp) -> Iterable[slice | None]:
    """Yield, for each rerun of an operation, the rows of its weights to use, or None for all rows. A linear operation with a large
    weight is rerun once for each of several pieces, so that no copy of the whole weight is needed.
    """
    given = [tensor for tensor in operation.args if isinstance(tensor, torch.Tensor)]
    count, width = given[1].shape if operation.name == "linear" and len(given) > 1 else (0, 0)
    of_weights = [id(tensor) in operation.sources and operation.sources[id(tensor)].itself for tensor in given]
    if count * width <= PIECE or operation.kwargs or of_weights[0] or not all(of_weights[1:]):
        yield None
        return
    step = max(1, PIECE // width // _ROWS) * _ROWS
    yield from (slice(start, min(start + step, count)) for start in range(0, count, step))


class _Rerun:
    """Reruns one operation with some of its weights cast to several dtypes, one after another. rows: as yielded by `_pieces`."""

    def __init__(
        self, operation: WeightOp, weights: tuple[str, ...], errors: LocalErrors, rows: slice | None = None
    ) -> None:
        self.operation = operation
        self.errors = errors
        self.rows = rows
        self.weights = weights
        self.activations = operation.activations
        self.floating = any(tensor.is_floating_point() for tensor in self.activations)
        self.func = operation.func
        device = operation.outputs[0].device
        if device.type == "cpu" and operation.name in PRODUCTS:
            self.func = summed_in_float32(operation.func)
        self.cast = {key: source for key, source in operation.sources.items() if source.weight in weights}
        self.new: dict[int, torch.Tensor] = {}
        self.known: dict[int, Weight] = {}
        self.site = WeightMode(self.known, device)
        self.site.module = operation.module
        for key, source in operation.sources.items():
            if source.weight not in weights:
                self._recompute(key, source, errors.stored(source.weight, source.rows or rows), "float32")

    def _recompute(self, key: int, source: WeightOrigin, value: torch.Tensor, dtype: str) -> int:
        """Replace the argument of the operation whose `id` is `key` by one that is computed from `value`, the new values of its
        weight. Returns the `id` of the new argument.
        """
        made = self.new[key] = source.remake(value)
        same_memory = made.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
        if source.itself or source.written or same_memory:
            self.known[id(made)] = Weight(self.errors.weights[source.weight].info, made, PlainSource(made), dtype)
        return id(made)

    def outputs(self, dtype: str) -> list[torch.Tensor]:
        operation, errors = self.operation, self.errors
        if operation.name == "embedding" and takes_rows(operation.args, operation.kwargs):
            ids, table = operation.args[:2]
            if id(ids) not in operation.sources and (source := self.cast.get(id(table))) is not None and source.itself:
                looked_up = errors.look_up(source.weight, dtype, ids)
                return [looked_up.to(errors.compute) if dtype in dtypes.STORAGE_DTYPES else looked_up]
        taken = []
        for key, source in self.cast.items():
            value = errors.cast(source.weight, dtype, source.rows or self.rows)
            if dtype in dtypes.STORAGE_DTYPES and not (source.itself and self.floating):
                value = value.to(errors.compute)  # no activation determines the dtype to dequantize to
            taken.append(self._recompute(key, source, value, dtype))
        new = self.new
        if dtype in dtypes.COMPUTE_DTYPES and operation.dtypes_read.intersection(self.weights):
            given = [tensor for tensor in self.activations if tensor.is_floating_point()]
            new = new | {id(tensor): tensor.to(torch_dtype(dtype)) for tensor in given}
        args, kwargs = replace_tensors(operation.args, operation.kwargs, new)
        if is_in_place(operation.name) and isinstance(args[0], torch.Tensor):
            args = (args[0].clone(), *args[1:])
        if errors.rounding is not None and dtype in dtypes.STORAGE_DTYPES:
            rounds = errors.rounding.wanted(operation.name, args, kwargs, dict.fromkeys(taken, InputFormat(dtype)))
            if rounds is not None:
                args, kwargs, _ = errors.rounding.apply(operation.name, args, kwargs, rounds)
        again = call_mixed(self.func, operation.name, args, kwargs, self.site)
        if again is None:  # `tensor[index] = value` returns nothing
            again = args[0]
        for made in taken:
            self.known.pop(made, None)
        return [tensor for tensor in tensors_in((again,), {}) if tensor.is_floating_point()]


@functools.cache
def summed_in_float32(func: Any) -> Any:
    """Return a variant of a matrix product or convolution that computes 16-bit arguments in float32 and rounds the result."""

    def product(*args: Any, **kwargs: Any) -> Any:
        floats = [tensor for tensor in tensors_in(args, kwargs) if tensor.is_floating_point()]
        dtypes_given = {tensor.dtype for tensor in floats}
        if len(dtypes_given) != 1 or (dtype := dtypes_given.pop()) not in _SIXTEEN_BITS:
            return func(*args, **kwargs)
        args, kwargs = replace_tensors(args, kwargs, {id(tensor): tensor.float() for tensor in floats})
        return func(*args, **kwargs).to(dtype)

    product.__name__ = func.__name__
    return product
