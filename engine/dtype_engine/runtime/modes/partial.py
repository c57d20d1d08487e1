"""Runs a model with cast weights in some modules only, and otherwise like the reference, to measure the error of these modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dtype_engine.runtime.libraries.torch_private import base_of
from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.modes.activations import ActivationRounding
from dtype_engine.runtime.modes.candidate import CandidateMode
from dtype_engine.runtime.modes.op_tables import Arguments, tensors_in
from dtype_engine.runtime.modes.reference import ReferenceMode
from dtype_engine.runtime.modes.weight_mode import WeightMode


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
        self._reference = ReferenceMode(weights, device, compute=compute)
        self._candidate = CandidateMode(weights, compute, device)
        super().__init__(weights, device, self._reference.replaced | self._candidate.replaced, compute, rounding)
        self.drifting = drifting
        self.inside = inside
        self.uses: dict[str, int] = {}
        """For each module, how many module calls had ended before it first used a `drifting` weight or read the weight's dtype."""

    def like_reference(self, module: str) -> bool:
        return not self.inside(module)

    @property
    def _run_of_module(self) -> WeightMode:
        """The mode, of the candidate or of the reference, that determines the weights' values in the running module."""
        return self._candidate if self.inside(self.module) else self._reference

    def dtype_of(self, weight: Weight) -> torch.dtype:
        return self._run_of_module.dtype_of(weight)

    def value_of(self, weight: Weight, dtype: torch.dtype | None) -> torch.Tensor:
        return self._run_of_module.value_of(weight, dtype)

    def rows_of(self, weight: Weight, ids: torch.Tensor) -> torch.Tensor:
        return self._run_of_module.rows_of(weight, ids)

    def part_of(self, weight: Weight, index: int) -> torch.Tensor | None:
        return self._run_of_module.part_of(weight, index)

    def is_quantized(self, weight: Weight) -> bool:
        return self._run_of_module.is_quantized(weight)

    def input_format(self, weight: Weight) -> Any:
        return self._run_of_module.input_format(weight)

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
