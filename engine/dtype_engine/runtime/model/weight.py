"""Holds one weight of a running module: its stored values, its current dtype, and how it is cast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dtype_engine.core import dtypes
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled
from dtype_engine.core.fused import whole_scale_group
from dtype_engine.core.tree import TensorInfo
from dtype_engine.results.losses import ValueLoss, total
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.formats.row_blocks import finite_amax, stopping
from dtype_engine.runtime.numerics.activations import InputFormat
from dtype_engine.runtime.numerics.overflow_underflow import all_losses, count_losses
from dtype_engine.runtime.numerics.quantize import cast_or_quantize
from dtype_engine.runtime.numerics.roundings import RoundedCodes, WeightStatistics, rounded_codes
from dtype_engine.runtime.weights.blockwise import BlockwiseSource
from dtype_engine.runtime.weights.kept_codes import KeptCodes
from dtype_engine.runtime.weights.source import WeightSource, placeholder


@dataclass(slots=True)
class Weight:
    """One distinct tensor of the module. A tied weight, which has several names in the module, is a single `Weight`."""

    info: TensorInfo
    tensor: torch.Tensor
    """The tensor object in the module. It has placeholder data if `blockwise` is True."""
    stored: WeightSource
    """The values from which every cast starts."""
    dtype: str
    """The current dtype, such as "bfloat16" or "nvfp4"."""
    scale: torch.Tensor | None = None
    """The scales of the codes that the module holds, or None if it holds no codes. A placeholder if `blockwise` is True."""
    rounded: RoundedCodes | KeptCodes | None = None
    """The current codes and scales, if a rounding such as GPTQ chose them: in a file if `blockwise` is True. None if the dtype has
    no rounding, and if no product used the weight in the calibration runs, so that it has the nearest codes.
    """
    decoded: bool = False
    """Whether each operation has to read or decode the stored values, because the module holds a placeholder for them."""
    losses: dict[str, ValueLoss | None] = field(default_factory=dict)
    """Caches, for each dtype, the counts of values that the cast makes infinite or zero, or saturates; None if it only rounds."""
    stashed: torch.Tensor | None = None
    """The cast data, while a reference run has the original data in the module."""
    other_reference: WeightSource | None = None
    """The weight's values in the reference model, if this is another checkpoint."""
    as_stored: bool = False
    """Whether the reference run computes with this weight in its stored dtype, as plain torch does, instead of in float32."""
    shares: tuple[str, ...] = ()
    """The names of the weights that currently have a common tensor scale, including this one, such as q, k and v in NVFP4."""
    part_losses: dict[tuple[str, int], ValueLoss] = field(default_factory=dict)
    """Caches losses of a weight that is cast in parts (`in_parts`), keyed by the dtype and the index of the part."""
    requires_grad: bool = False
    """Whether the model's code made it a parameter that requires gradients. torch chooses some kernels by that, without gradients
    too: `linear` in float16 rounds otherwise for an input that is not contiguous.
    """
    _sharing: tuple[Weight, ...] = ()
    _amax: float | None = None

    @property
    def reference(self) -> WeightSource:
        """The values that the reference model has."""
        return self.stored if self.other_reference is None else self.other_reference

    @property
    def cast(self) -> bool:
        """Whether the current dtype differs from the stored one."""
        return self.dtype != self.info.dtype

    @property
    def differs(self) -> bool:
        """Whether a reference run needs other data for this weight than the module has."""
        return self.cast or self.other_reference is not None

    @property
    def has_scales(self) -> bool:
        """Whether the weight is in a format of this program with scales, such as float8, either cast or as stored."""
        return self.scale is not None or (self.decoded and self.stored.own)

    @property
    def blockwise(self) -> bool:
        """Whether the model is larger than memory, so that each pass reads, and casts, the values when it reaches the weight."""
        return isinstance(self.stored, BlockwiseSource)

    def current(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (the current data, its scales or None for a dtype without scales). Either the weight must be cast, or the module
        must hold its values.
        """
        if not isinstance(self.stored, BlockwiseSource):
            return self.tensor.data, self.scale
        key = id(self), self.dtype, self.tensor.device
        return self.stored.memory.once(key, self._cast_values, self.stored.inner)

    def _cast_values(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        if isinstance(self.rounded, KeptCodes):
            return self.rounded.read()
        amax = max((weight.amax for weight in self._sharing), default=None)
        stored = self.stored.read(self.tensor.device)
        made = cast_or_quantize(stored, self.dtype, amax)
        if self.dtype not in self.losses:  # later, the values would have to be read again
            self.losses[self.dtype] = count_losses(self.info.name, stored, self.dtype, made[0], never)
        return made

    def in_parts(self, dtype: str) -> bool:
        """Return whether a weight of a model larger than memory can be cast for one index of its first dimension alone, such as one
        expert, because no block of the format has values of two indexes.
        """
        if not isinstance(self.stored, BlockwiseSource) or not self.stored.has_parts:
            return False
        blocks = dtypes.BY_NAME[dtype].blocks
        return blocks is None or blocks.rows == 1 or self.stored.shape[-1] >= blocks.columns

    def current_part(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (the current data, its scales or None) at one index of the first dimension: [1, ...]. `in_parts` must be True for
        the weight's dtype.
        """
        assert isinstance(self.stored, BlockwiseSource)
        key = id(self), self.dtype, self.tensor.device, index
        return self.stored.memory.once(key, lambda: self._cast_part(index, self.dtype), self.stored.inner)

    def _cast_part(self, index: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        if isinstance(self.rounded, KeptCodes) and dtype == self.dtype:
            return self.rounded.read(slice(index, index + 1))
        stored = self._part(index)
        made = cast_or_quantize(stored, dtype, self.scale_amax(dtype, self._sharing if dtype == self.dtype else ()))
        if (dtype, index) not in self.part_losses:
            self.part_losses[dtype, index] = all_losses(self.info.name, stored, dtype, made[0])
        return made

    def _part(self, index: int) -> torch.Tensor:
        part = self.stored.part(index, self.tensor.device)
        assert part is not None
        return part[None]

    def scale_amax(self, dtype: str, sharing: Sequence[Weight]) -> float | None:
        """Return the largest |value| from which the tensor scale in `dtype` is computed, or None if it has no tensor scale.
        sharing: the weights that share it, including this one, or ().
        """
        row = dtypes.BY_NAME[dtype]
        if not row.per_tensor and (row.blocks is None or not row.blocks.tensor_scale):
            return None
        return max(weight.amax for weight in sharing or (self,))

    def rounded_parts(
        self, dtype: str, given: WeightStatistics, amax: float | None
    ) -> Iterator[tuple[torch.Tensor, WeightStatistics, RoundedCodes]]:
        """Yield (stored values, statistics of their inputs, what a rounding chooses for them): of the whole weight or, if it is
        cast in parts, of one index of the first dimension after another. amax: as `scale_amax` returns it.
        """
        if not self.in_parts(dtype):
            stored = self.stored.read(self.tensor.device)
            yield stored, given, rounded_codes(stored, dtype, given, amax)
            return
        for index in range(self.stored.shape[0]):
            stored, of_part = self._part(index), given.at(index)
            yield stored, of_part, rounded_codes(stored, dtype, of_part, amax)

    @property
    def input_format(self) -> InputFormat | None:
        """How runtimes round the activations that this weight multiplies, or None if they do not. They round to the weight's
        format. If another program quantized the weight and no rule casts it, they round as the files declare.
        """
        return InputFormat(self.dtype) if self.scale is not None else self.stored.input_format if self.decoded else None

    @property
    def form(self) -> str:
        """A text that identifies this weight's current values: the dtype, and the names of the weights that share its scale."""
        return " ".join((self.dtype, *self.shares))

    @property
    def amax(self) -> float:
        """The largest finite |value| of the stored data."""
        if self._amax is None:
            if isinstance(self.stored, BlockwiseSource) and self.stored.has_parts:
                self._amax = max(finite_amax(self._part(index)) for index in range(self.stored.shape[0]))
            else:
                self._amax = finite_amax(self.stored.read())
        return self._amax

    def _losses_of_parts(self, dtype: str, cancelled: IsCancelled) -> ValueLoss | None:
        for index in range(self.stored.shape[0]):
            if cancelled():
                raise Cancelled
            if (dtype, index) not in self.part_losses:  # such as an expert to which no token was sent
                self._cast_part(index, dtype)
        self.stored.release()
        loss = total([self.part_losses[dtype, index] for index in range(self.stored.shape[0])])
        return loss if loss.is_listed else None

    def cast_to(
        self, dtype: str, sharing: Sequence[Weight] = (), rounded: RoundedCodes | KeptCodes | None = None
    ) -> None:
        """Cast the stored values to `dtype`. sharing: the weights that get a common tensor scale, including this one. rounded: the
        codes that a rounding chose, or None for the nearest ones.
        """
        shares = tuple(weight.info.name for weight in sharing)
        if shares != self.shares:
            self.losses.pop(dtype, None)
            self.part_losses = {key: loss for key, loss in self.part_losses.items() if key[0] != dtype}
        self.shares, self._sharing, self.rounded = shares, tuple(sharing), rounded
        if isinstance(rounded, RoundedCodes):
            self.tensor.data, self.scale = rounded.codes, rounded.scale
        elif self.blockwise and dtype != self.info.dtype:
            held = torch_dtype(dtype) if dtype in dtypes.COMPUTE_DTYPES else self.stored.holds
            self.tensor.data = placeholder(self.stored.shape, held, self.tensor.device)
            self.scale = None if dtype in dtypes.COMPUTE_DTYPES else torch.ones(1)
        elif dtype == self.info.dtype:
            self.tensor.data, self.scale = self.stored.held(self.tensor.device), None
        else:
            amax = max((weight.amax for weight in sharing), default=None)
            self.tensor.data, self.scale = cast_or_quantize(self.stored.read(self.tensor.device), dtype, amax)
        if isinstance(rounded, KeptCodes):
            self.losses[dtype] = rounded.loss
        self.dtype, self.decoded = dtype, dtype == self.info.dtype and not self.stored.plain

    def count_loss(self, dtype: str, cancelled: IsCancelled, cast: bool = False) -> ValueLoss | None:
        """Return the counts of values that a cast to `dtype` makes infinite or zero, or saturates. Returns None if it only rounds,
        and for the stored dtype. The counts are kept in `losses`. Raises Cancelled.

        cast: True if the weight currently has this dtype. The current data, which must not change during the call, is then
        examined instead of casting again.
        """
        if dtype == self.info.dtype:
            return None
        if dtype not in self.losses:
            if self.in_parts(dtype):
                self.losses[dtype] = self._losses_of_parts(dtype, cancelled)
                return self.losses[dtype]
            held = None
            if cast:  # reading the values of a blockwise weight may already count their losses
                held = self.current()[0] if self.blockwise or self.stashed is None else self.stashed
            if dtype not in self.losses:
                with stopping(cancelled):
                    self.losses[dtype] = count_losses(self.info.name, self.stored.read(), dtype, held, cancelled)
        return self.losses[dtype]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the current data and scales."""
        if self.decoded or self.blockwise:
            return self.stored.nbytes
        held = self.tensor if self.stashed is None else self.stashed
        if held.layout is not torch.strided:
            return self.info.nbytes
        return held.nbytes + (self.scale.nbytes if self.scale is not None else 0)


def sharing(weights: Mapping[str, Weight], name: str, dtype: str) -> list[Weight]:
    """Return the weights that would share one scale with the weight `name` if all were in `dtype`, including the weight itself, or
    [] if no other would share it. weights: all weights of the model, keyed by name.
    """
    group = [weights[member] for member in whole_scale_group(name, dtype, weights)]
    castable = [weight for weight in group if not weight.info.own_codes]
    return castable if len(castable) > 1 else []
