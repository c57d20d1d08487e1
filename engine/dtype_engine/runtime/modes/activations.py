"""Which inputs of an operation are rounded together with its weight, and doing it: the run setting `quantize_activations`.

Runtimes quantise the inputs of matrix products alone, so only these are rounded, in any form that a model may call them. A weight
is followed through what is a function of it alone: its transpose, an expert's part of it, a cast of it. Convolutions, recurrent
layers and torch's own attention modules stay as they are, and are named in `left_wide`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtype_engine.core.dtypes import quantizes_activations
from dtype_engine.runtime.model.torch_private import WeakIdKeyDictionary
from dtype_engine.runtime.modes.op_tables import Arguments, tensors_in
from dtype_engine.runtime.numerics.activations import quantize_activations

_LEFT, _RIGHT = -1, -2
"""The dimension that a product sums over: of its left matrix, and of its right one."""

_Operand = tuple[int, str, int]
"""An argument's position, its keyword, and the dimension that is summed over."""
_PRODUCTS: dict[str, tuple[_Operand, _Operand]] = {
    "linear": ((0, "input", _LEFT), (1, "weight", _LEFT)),
    "matmul": ((0, "input", _LEFT), (1, "other", _RIGHT)),
    "__matmul__": ((0, "", _LEFT), (1, "", _RIGHT)),
    "__rmatmul__": ((0, "", _RIGHT), (1, "", _LEFT)),
    "mm": ((0, "input", _LEFT), (1, "mat2", _RIGHT)),
    "bmm": ((0, "input", _LEFT), (1, "mat2", _RIGHT)),
    "mv": ((0, "input", _LEFT), (1, "vec", _RIGHT)),
    "inner": ((0, "input", _LEFT), (1, "other", _LEFT)),
    "addmm": ((1, "mat1", _LEFT), (2, "mat2", _RIGHT)),
    "addmv": ((1, "mat", _LEFT), (2, "vec", _RIGHT)),
    "baddbmm": ((1, "batch1", _LEFT), (2, "batch2", _RIGHT)),
    "addbmm": ((1, "batch1", _LEFT), (2, "batch2", _RIGHT)),
    "_grouped_mm": ((0, "self", _LEFT), (1, "mat2", _RIGHT)),
    "grouped_mm": ((0, "mat_a", _LEFT), (1, "mat_b", _RIGHT)),
}
_OTHERS = frozenset(
    {
        "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc", "lstm", "gru",
        "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "multi_head_attention_forward",
        "bilinear", "tensordot", "chain_matmul", "_transformer_encoder_layer_fwd", "_native_multi_head_attention",
        "scaled_dot_product_attention",
    }
)  # fmt: skip
"""Products too, whose inputs no runtime quantises, or whose parts can't be seen from outside."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The operand of a product that is to be rounded: its index among the two, the format, and the dimension summed over."""

    operand: int
    dtype: str
    dim: int


class ActivationRounding:
    """Knows which tensors of a pass are quantised weights or made of one, and rounds what these are multiplied with."""

    def __init__(self) -> None:
        self.left_wide: set[str] = set()
        """Operations whose weight was quantised and whose input was not rounded."""
        self._made: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()

    def formats(self, tensors: list[torch.Tensor], stored: Mapping[int, str]) -> dict[int, str]:
        """The format of each quantised weight among these, by id; `stored`: of those that the caller knows itself."""
        found = {}
        for tensor in tensors:
            dtype = stored.get(id(tensor)) or self._made.get(tensor)
            if dtype is not None:
                found[id(tensor)] = dtype
        return found

    def follow(self, output: Any, tensors: list[torch.Tensor], formats: Mapping[int, str]) -> None:
        """Remember the results of an operation as weights, if it had no other floats than weights of one format."""
        floats = [id(tensor) for tensor in tensors if tensor.is_floating_point() or id(tensor) in formats]
        kinds = {formats.get(key) for key in floats}
        if len(kinds) == 1 and (dtype := kinds.pop()) is not None:
            for made in tensors_in((output,), {}):
                if made.is_floating_point():
                    self._made[made] = dtype

    def wanted(
        self, name: str, args: Arguments, kwargs: Mapping[str, Any], formats: Mapping[int, str]
    ) -> Rounds | None:
        """The operand that is to be rounded, None where there is none. The arguments are those that the model gave."""
        if name == "einsum":
            return _of_einsum(args, formats)
        if name not in _PRODUCTS:
            if name in _OTHERS and any(quantizes_activations(dtype) for dtype in formats.values()):
                self.left_wide.add(name)
            return None
        operands = [_operand(args, kwargs, operand) for operand in _PRODUCTS[name]]
        weight = _weight_among(operands, formats)
        if weight is None or not isinstance(other := operands[1 - weight[0]], torch.Tensor):
            return None
        dim = _PRODUCTS[name][1 - weight[0]][2]
        return Rounds(1 - weight[0], weight[1], dim if other.ndim > 1 else -1)

    def apply(
        self,
        name: str,
        args: Arguments,
        kwargs: dict[str, Any],
        rounds: Rounds,
        dtype: torch.dtype | None = None,
    ) -> tuple[Arguments, dict[str, Any], torch.Tensor]:
        """The arguments that torch is to be called with, one operand rounded; and that operand as it was before.

        dtype: what the operand is cast to first, None for its own.
        """
        operand = (rounds.operand + 1, "", 0) if name == "einsum" else _PRODUCTS[name][rounds.operand]
        before: torch.Tensor = _operand(args, kwargs, operand)
        values = before.movedim(rounds.dim, -1).to(dtype or before.dtype)
        after = quantize_activations(values, rounds.dtype).movedim(-1, rounds.dim)
        position, keyword, _ = operand
        if position < len(args):
            return (*args[:position], after, *args[position + 1 :]), kwargs, before
        return args, kwargs | {keyword: after}, before


def _weight_among(operands: Sequence[Any], formats: Mapping[int, str]) -> tuple[int, str] | None:
    """Which of two operands is the weight, and its format: the right one where both are, since a learnt token is an input."""
    known = [formats.get(id(operand)) for operand in operands]
    index = 1 if known[1] is not None else 0
    dtype = known[index]
    return (index, dtype) if dtype is not None and quantizes_activations(dtype) else None


def _operand(args: Arguments, kwargs: Mapping[str, Any], operand: _Operand) -> Any:
    position, keyword, _ = operand
    return args[position] if position < len(args) else kwargs.get(keyword)


def _of_einsum(args: Arguments, formats: Mapping[int, str]) -> Rounds | None:
    """`wanted` of an einsum of two tensors that sums over one letter of both."""
    if len(args) != 3 or not isinstance(args[0], str) or "." in args[0] or "->" not in args[0]:
        return None
    inputs, output = args[0].replace(" ", "").split("->")
    letters = inputs.split(",")
    summed = [letter for letter in letters[0] if letter in letters[-1] and letter not in output]
    weight = _weight_among(args[1:], formats)
    if len(letters) != 2 or len(summed) != 1 or weight is None:
        return None
    return Rounds(1 - weight[0], weight[1], letters[1 - weight[0]].index(summed[0]))
