"""Measures the largest absolute value of each linear layer's input over the calibration inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.options import RunSettings
from dtype_engine.runtime.formats.row_blocks import finite_amax
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.model.torch_private import WithoutModes
from dtype_engine.runtime.passes.model_behavior import ModelBehavior
from dtype_engine.runtime.passes.runner import ForwardRunner


def input_ranges(
    model: LiveModel,
    inputs: Inputs,
    settings: RunSettings,
    weights: Sequence[str],
    cancelled: IsCancelled,
    behavior: ModelBehavior,
) -> dict[str, float]:
    """Run the model over all inputs, and return for each weight in `weights` the largest finite |value| of its layer's input.

    The model runs as currently cast, under `settings`. If `settings` quantize activations, the values are taken before quantizing.
    Layers that are not called are omitted. behavior: what earlier passes have shown about the model. Raises NoForward, KernelError,
    Cancelled.
    """
    found: dict[str, float] = {}

    def look(weight: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = args[0] if args else kwargs.get("input")
            if isinstance(given, torch.Tensor) and given.numel():
                with WithoutModes():
                    found[weight] = max(found.get(weight, 0.0), finite_amax(given.detach()))

        return hook

    handles = []
    try:
        for weight in weights:
            layer = model.module.get_submodule(weight.rpartition(".")[0])
            handles.append(layer.register_forward_pre_hook(look(weight), with_kwargs=True))
        with ForwardRunner(model, settings, cancelled, watch=False, behavior=behavior) as runner:
            for batch in inputs.batches:
                runner.candidate(runner.candidate_call(batch))
    finally:
        for handle in handles:
            handle.remove()
    return found
