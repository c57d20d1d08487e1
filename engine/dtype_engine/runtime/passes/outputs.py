"""Selects one tensor to compare from what a module or a model returned."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from dtype_engine.core.errors import NoForward
from dtype_engine.runtime.libraries.torch_private import is_wrapped
from dtype_engine.runtime.model.containers import parts_of


def first_tensor(output: Any) -> torch.Tensor | None:
    """Return the first float tensor in a module's output, at any depth in its containers, or None if there is none."""
    if isinstance(output, torch.Tensor):
        has_values = output.layout is torch.strided and not output.is_nested and not is_wrapped(output)
        return output if has_values and output.is_floating_point() else None
    for _, value in parts_of(output):
        tensor = first_tensor(value)
        if tensor is not None:
            return tensor
    return None


_MAIN_OUTPUTS = ("logits", "logits_per_image", "start_logits", "prediction_logits", "last_hidden_state", "image_embeds")


def main_output(output: Any) -> tuple[str, torch.Tensor]:
    """Return the name and the tensor on which drift is measured: the logits, or else the last hidden state, or else the first float
    tensor of the model's output. Raises NoForward if there is no float tensor, or one without elements.
    """
    name, tensor = _main_output(output)
    if tensor is None:
        raise NoForward(
            f"the model returned a {type(output).__name__} without any float tensor in it, so there is nothing to compare"
        )
    if not tensor.numel():
        raise NoForward(
            f"the model's output ({name}, {tuple(tensor.shape)}) has no values, so there is nothing to compare"
        )
    return name, tensor


def _main_output(output: Any) -> tuple[str, torch.Tensor | None]:
    if isinstance(output, Mapping) or dataclasses.is_dataclass(output):
        named = dict(parts_of(output))
        for name in _MAIN_OUTPUTS:
            if isinstance(value := named.get(name), torch.Tensor) and first_tensor(value) is value:
                return name, value
        for name, value in named.items():
            tensor = first_tensor(value)
            if tensor is not None:
                return name, tensor
    return "output", first_tensor(output)
