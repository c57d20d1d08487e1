"""Measures the largest absolute value of each linear layer's input over the calibration inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.options import RunSettings
from dtype_engine.runtime.formats.row_blocks import finite_amax
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.libraries.torch_private import WithoutModes
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.kept_positions import AttendedPositions, KeptPositions
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
    """Run the model as currently cast over all inputs, and return for each weight in `weights` the largest finite |value| of its
    layer's input, before activations are quantized.

    Positions that a mask of the inputs leaves out do not count. Layers that are not called are omitted. behavior: what earlier
    passes have shown about the model. Raises NoForward, KernelError, Cancelled.
    """
    found: dict[str, float] = {}
    masks: KeptPositions | None = None
    calls = Counter[str]()

    def look(weight: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = args[0] if args else kwargs.get("input")
            if isinstance(given, torch.Tensor) and given.numel():
                with WithoutModes():
                    name, values = weight.rpartition(".")[0], given.detach()
                    kept = None if masks is None else masks.of_module(name, calls[name], values)
                    values = values if kept is None else values[kept.to(values.device)]
                    found[weight] = max(found.get(weight, 0.0), finite_amax(values))
                    calls[name] += 1

        return hook

    watch = bool(model.cache_formats)
    with ForwardRunner(model, settings, cancelled, watch, behavior) as runner, ExitStack() as hooks:
        runner.calibrate_caches(inputs.batches)
        for weight in weights:
            layer = model.module.get_submodule(weight.rpartition(".")[0])
            hooks.enter_context(layer.register_forward_pre_hook(look(weight), with_kwargs=True))
        for batch in inputs.batches:
            masks = KeptPositions.of(model.module, batch, model.device, AttendedPositions())
            calls.clear()
            runner.candidate(runner.candidate_call(batch))
    return found
