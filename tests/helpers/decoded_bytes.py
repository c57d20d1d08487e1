"""Counts the bytes of a plain model's weights that decoding a token reads, from torch's operations alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_OF_ROWS = ("aten::embedding", "aten::index", "aten::index_select")
"""Operations that read only those elements of their first argument that they return."""

_CACHES = ("cache", "past_key_values", "cache_params")
"""The names that versions and models of transformers give to the cache that a pass returns and takes."""


class _Reads(TorchDispatchMode):
    """Marks the elements of tensors that operations read. An operation whose result is a view reads nothing."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.read = {
            _storage(tensor): torch.zeros(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=torch.bool)
            for tensor in tensors
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        views = {_storage(each) for each in _tensors(output)}
        for tensor in _tensors([*args, *(kwargs or {}).values()]):
            marks = self.read.get(_storage(tensor))
            if marks is None or _storage(tensor) in views:
                continue
            read = torch.arange(len(marks)).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            if func._schema.name in _OF_ROWS and tensor is args[0]:
                read = func(read, *args[1:])
            marks[read.reshape(-1)] = True
        return output


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(given: Any) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    return [found for each in given for found in _tensors(each)] if isinstance(given, list | tuple) else []


@torch.no_grad()
def decoded_bytes(model: Any, inputs: dict[str, torch.Tensor]) -> int:
    """Return the bytes of the parameters and persistent buffers of a model of transformers that decoding one more token reads,
    after a pass over `inputs`.
    """
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others hand all experts to one operation
    before = model(**inputs, use_cache=True)
    cache = next(name for name in _CACHES if getattr(before, name, None) is not None)
    step: dict[str, Any] = {cache: getattr(before, cache), "use_cache": True}
    token = torch.tensor([[5]])
    if "decoder_input_ids" in inputs:
        step |= {"decoder_input_ids": token, "encoder_outputs": (before.encoder_last_hidden_state,)}
    else:
        step["input_ids"] = token
    stored = list(model.state_dict().values())
    with _Reads(stored) as reads:
        model(**step)
    sizes = {_storage(tensor): tensor.element_size() for tensor in stored}
    return sum(int(marks.sum()) * sizes[key] for key, marks in reads.read.items())
