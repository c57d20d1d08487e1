"""Runs a model with cast weights in some modules only, and otherwise like the reference, to measure the error of these modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dtype_engine.runtime.libraries.torch_private import base_of
from dtype_engine.runtime.model.live import Weight
from dtype_engine.runtime.modes.activations import ActivationRounding
from dtype_engine.runtime.modes.candidate import candidate_dtype, candidate_part, candidate_rows, candidate_value
from dtype_engine.runtime.modes.op_tables import Arguments, tensors_in
from dtype_engine.runtime.modes.reference import (
    holds_reference,
    is_coded,
    reference_dtype,
    reference_part,
    reference_rows,
    reference_value,
)
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.numerics.activations import InputFormat


class PartialCastMode(WeightMode):
    """A torch-function mode that uses the cast weights in modules for which `inside(name)` is True, like a candidate run. In all
    other modules, it uses the weights of the reference run.

    drifting: the `id`s of the weights whose casts change results. Uses of these weights are recorded in `uses`.
    """

    def __init__(
        self,
        weights: Mapping[int, Weight],
        device: torch.device,
        compute: torch.dtype,
        drifting: frozenset[int],
        inside: Callable[[str], bool],
        rounding: ActivationRounding | None = None,
    ) -> None:
        replaced = (
            key
            for key, weight in weights.items()
            if weight.scale is not None or weight.decoded or not holds_reference(weight)
        )
        super().__init__(weights, device, replaced, compute, rounding)
        self.drifting = drifting
        self.inside = inside
        self.uses: dict[str, int] = {}
        """How many module calls had ended before a module first used one of the `drifting` weights or read its dtype, keyed by the
        module's name.
        """

    def like_reference(self, module: str) -> bool:
        return not self.inside(module)

    def dtype_of(self, weight: Weight) -> torch.dtype:
        if not self.inside(self.module):
            return self.compute if is_coded(weight) else reference_dtype(weight)
        return candidate_dtype(weight, self.compute)

    def value_of(self, weight: Weight, dtype: torch.dtype | None) -> torch.Tensor:
        if not self.inside(self.module):
            return reference_value(weight, weight.tensor.device, dtype or self.compute)
        return candidate_value(weight, dtype or self.compute)

    def rows_of(self, weight: Weight, ids: torch.Tensor) -> torch.Tensor:
        if not self.inside(self.module):
            return reference_rows(weight, ids, weight.tensor.device, self.compute)
        return candidate_rows(weight, ids, self.compute)

    def part_of(self, weight: Weight, index: int) -> torch.Tensor | None:
        if not self.inside(self.module):
            return reference_part(weight, index)
        return candidate_part(weight, index, self.compute)

    def is_quantized(self, weight: Weight) -> bool:
        return weight.has_scales if self.inside(self.module) else is_coded(weight)

    def input_format(self, weight: Weight) -> InputFormat | None:
        return weight.input_format if self.inside(self.module) else super().input_format(weight)

    def note_use(self, key: int) -> None:
        super().note_use(key)
        if key in self.drifting:
            self.uses.setdefault(self.module, self.finished)

    def run(self, func: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
        for tensor in tensors_in(args, kwargs):
            key = id(tensor) if id(tensor) in self.weights else id(base_of(tensor))
            if key in self.weights:
                self.note_use(key)
        return super().run(func, name, args, kwargs)
