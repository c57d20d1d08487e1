"""Which tensor of a module's output is compared."""

from __future__ import annotations

from typing import Any

import torch

from dtype_engine.core.errors import NoForward


def first_tensor(output: Any) -> torch.Tensor | None:
    """The first float tensor in a module's output: itself, or in a tuple, list, dict or model output."""
    if isinstance(output, torch.Tensor):
        return (
            output if output.is_floating_point() and output.layout is torch.strided and not output.is_nested else None
        )
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    for value in values:
        tensor = first_tensor(value)
        if tensor is not None:
            return tensor
    return None


_MAIN_OUTPUTS = ("logits", "logits_per_image", "start_logits", "prediction_logits", "last_hidden_state", "image_embeds")


def main_output(output: Any) -> tuple[str, torch.Tensor]:
    """The output that drift is measured on: logits, else the last hidden state, else the first float tensor.

    Raises NoForward when the model returned no float tensor at all, or one without values.
    """
    name, tensor = _main_output(output)
    if tensor is not None and not tensor.numel():
        raise NoForward(
            f"the model's output ({name}, {tuple(tensor.shape)}) has no values, so there is nothing to compare"
        )
    if tensor is None:
        raise NoForward(
            f"the model returned a {type(output).__name__} without any float tensor in it, so there is nothing to compare"
        )
    return name, tensor


def _main_output(output: Any) -> tuple[str, torch.Tensor | None]:
    if isinstance(output, dict):
        for name in _MAIN_OUTPUTS:
            if isinstance(value := output.get(name), torch.Tensor) and first_tensor(value) is value:
                return name, value
        for key, value in output.items():
            tensor = first_tensor(value)
            if tensor is not None:
                return str(key), tensor
    return "output", first_tensor(output)
