"""Finds the matrix products with weights in a forward pass, and rounds their inputs if the weights are quantized and the run
setting `quantize_activations` requests it.

Runtimes quantize only the inputs of matrix products, so only these are found, whichever torch function computes the product. A
tensor computed from one weight alone (its transpose, a cast of it, the part of one expert) counts as that weight. Inputs of
convolutions, recurrent layers and torch's own attention modules are not rounded; `left_wide` collects the names of these
operations.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from dtype_engine.core.dtypes import quantizes_activations
from dtype_engine.runtime.libraries.torch_private import WeakIdKeyDictionary
from dtype_engine.runtime.modes.op_tables import Arguments, tensors_in
from dtype_engine.runtime.numerics.activations import InputFormat, quantize_activations

_LEFT, _RIGHT = -1, -2
"""The dimension over which a matrix product sums: the last of the left matrix, the second to last of the right one."""

_Operand = tuple[int, str, int]
"""One operand of a matrix product: the position of the argument, its keyword, and the dimension over which the product sums."""
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
"""Operations with matrix products whose inputs no runtime quantizes, or which a torch-function mode can't reach."""


Label = TypeVar("Label")
"""What stands for a weight, such as the format of its inputs."""


@dataclass(frozen=True, slots=True)
class Product(Generic[Label]):
    """A matrix product with a weight: which operand (0 or 1) is the input, the weight's label, and over which dimension of the
    input (`dim`) and of the weight (`of_weight`) it sums.
    """

    operand: int
    form: Label
    dim: int
    of_weight: int


Rounds = Product[InputFormat]


class WeightProducts(Generic[Label]):
    """Follows weights, and tensors computed from a single weight, to the matrix products in which they are used."""

    def __init__(self) -> None:
        self.left_wide: set[str] = set()
        """Names of operations that used a weight, but whose activations are not found."""
        self._made: MutableMapping[torch.Tensor, Label] = WeakIdKeyDictionary()

    def counts(self, form: Label) -> bool:
        """Return whether products with a weight of this label are found."""
        return True

    def formats(self, tensors: list[torch.Tensor], stored: Mapping[int, Label]) -> dict[int, Label]:
        """Return the labels of those `tensors` that are weights or were computed from one, keyed by the tensor's `id`. stored: the
        labels of the weights, keyed by `id`.
        """
        return {
            id(tensor): form
            for tensor in tensors
            if (form := stored.get(id(tensor)) or self._made.get(tensor)) is not None
        }

    def label(self, tensor: torch.Tensor, form: Label) -> None:
        """Let a tensor count as a weight of the label `form`."""
        self._made[tensor] = form

    def follow(self, output: Any, tensors: list[torch.Tensor], formats: Mapping[int, Label]) -> None:
        """If all float arguments are weights of one label, let the float results of the operation count as weights of this label,
        too.
        """
        floats = [id(tensor) for tensor in tensors if tensor.is_floating_point() or id(tensor) in formats]
        kinds = {formats.get(key) for key in floats}
        if len(kinds) == 1 and (form := kinds.pop()) is not None:
            for made in tensors_in((output,), {}):
                if made.is_floating_point():
                    self._made[made] = form

    def wanted(
        self, name: str, args: Arguments, kwargs: Mapping[str, Any], formats: Mapping[int, Label]
    ) -> Product[Label] | None:
        """Return the product with a weight that a torch call computes, or None. args, kwargs: the arguments, in which weights are
        not yet replaced by their values. formats: as returned by `formats`.
        """
        if name == "einsum":
            return self._of_einsum(args, formats)
        if name not in _PRODUCTS:
            if name in _OTHERS and any(map(self.counts, formats.values())):
                self.left_wide.add(name)
            return None
        operands = [_operand(args, kwargs, operand) for operand in _PRODUCTS[name]]
        weight = self._weight_among(operands, formats)
        if weight is None or not isinstance(other := operands[1 - weight[0]], torch.Tensor):
            return None
        dim = _PRODUCTS[name][1 - weight[0]][2]
        return Product(1 - weight[0], weight[1], dim if other.ndim > 1 else -1, _PRODUCTS[name][weight[0]][2])

    def _weight_among(self, operands: Sequence[Any], formats: Mapping[int, Label]) -> tuple[int, Label] | None:
        """Return (index, label) of the operand that is a weight, or None if no operand is one. If both operands are weights, the
        right one is returned, since the left one then acts as the input, such as a learned token.
        """
        known = [formats.get(id(operand)) for operand in operands]
        index = 1 if known[1] is not None else 0
        form = known[index]
        return (index, form) if form is not None and self.counts(form) else None

    def _of_einsum(self, args: Arguments, formats: Mapping[int, Label]) -> Product[Label] | None:
        """Return the product of an einsum that has two operands and sums over one letter that both have. Returns None for any other
        einsum, and if neither operand is a weight. formats: the labels of weights among the operands, keyed by `id`.
        """
        if len(args) != 3 or not isinstance(args[0], str) or "." in args[0] or "->" not in args[0]:
            return None
        inputs, output = args[0].replace(" ", "").split("->")
        letters = inputs.split(",")
        summed = [letter for letter in letters[0] if letter in letters[-1] and letter not in output]
        weight = self._weight_among(args[1:], formats)
        if len(letters) != 2 or len(summed) != 1 or weight is None:
            return None
        index, form = weight
        return Product(1 - index, form, letters[1 - index].index(summed[0]), letters[index].index(summed[0]))

    def apply(
        self,
        name: str,
        args: Arguments,
        kwargs: dict[str, Any],
        product: Product[Label],
        dtype: torch.dtype | None = None,
    ) -> tuple[Arguments, dict[str, Any], torch.Tensor]:
        """Replace the input of a product. Returns (args, kwargs, the input before)."""
        raise NotImplementedError


class ActivationRounding(WeightProducts[InputFormat]):
    """Rounds the activations that are multiplied by quantized weights, or by tensors computed from a single quantized weight."""

    def counts(self, form: InputFormat) -> bool:
        return quantizes_activations(form.dtype)

    def apply(
        self,
        name: str,
        args: Arguments,
        kwargs: dict[str, Any],
        product: Rounds,
        dtype: torch.dtype | None = None,
    ) -> tuple[Arguments, dict[str, Any], torch.Tensor]:
        """Round the input of a product, after a cast to `dtype` if given. Returns (args, kwargs, input before rounding)."""
        operand = _place_of(name, product.operand)
        before: torch.Tensor = _operand(args, kwargs, operand)
        values = before.movedim(product.dim, -1).to(dtype or before.dtype)
        after = quantize_activations(values, product.form.dtype, product.form.scale).movedim(-1, product.dim)
        position, keyword, _ = operand
        if position < len(args):
            return (*args[:position], after, *args[position + 1 :]), kwargs, before
        return args, kwargs | {keyword: after}, before


def operand_of(name: str, args: Arguments, kwargs: Mapping[str, Any], operand: int) -> Any:
    """Return an operand (0 or 1) of the product that the torch function `name` computes."""
    return _operand(args, kwargs, _place_of(name, operand))


def _place_of(name: str, operand: int) -> _Operand:
    return (operand + 1, "", 0) if name == "einsum" else _PRODUCTS[name][operand]


def _operand(args: Arguments, kwargs: Mapping[str, Any], operand: _Operand) -> Any:
    position, keyword, _ = operand
    return args[position] if position < len(args) else kwargs.get(keyword)
