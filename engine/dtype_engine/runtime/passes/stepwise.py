"""Runs a sequence token by token with a KV cache, as decoding does, and joins what the modules computed."""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dtype_engine.core.callbacks import ignore
from dtype_engine.core.errors import UserError
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.passes.forward_pass import ModuleObserver
from dtype_engine.runtime.passes.outputs import main_output

_IDS, _MASK = "input_ids", "attention_mask"
_CACHES = ("cache", "past_key_values", "cache_params", "state")
"""The names of the argument for what a model keeps of earlier tokens, and of the output with it: transformers' cache, by its newest
name and older ones, or RWKV's list of states.
"""
_RETURN_NONE = ("recurrent_gemma",)
"""The types of transformers' models that take a cache and do not return it."""
STATES = "a model with rounded recurrent states"
"""What runs token by token because a recipe gives recurrent states a format: they are rounded after each token."""


class StepObserver(ModuleObserver):
    """Keeps copies of the modules' outputs of each token, and gives them, joined, to another observer."""

    def __init__(self, observer: ModuleObserver) -> None:
        self._observer = observer
        self._steps = 0
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._outputs: dict[tuple[str, int], list[torch.Tensor]] = {}
        self._choices: dict[tuple[str, int], list[torch.Tensor]] = {}

    def begin_step(self, done: int, steps: int) -> None:
        self._steps += 1
        self._calls.clear()
        self._observer.begin_step(done, steps)

    def __call__(self, module: str, call: int, output: torch.Tensor) -> None:
        key = module, self._calls[module]
        self._calls[module] += 1
        self._outputs.setdefault(key, []).append(output.detach().clone())

    def take_choice(self, module: str, call: int, chosen: torch.Tensor) -> None:
        self._choices.setdefault((module, self._calls[module]), []).append(chosen.clone())

    def give(self) -> set[str]:
        """Give the joined outputs to the observer. Returns the names of the modules that it does not get, because they did not run
        for each token, such as experts.
        """
        left_out = set[str]()
        for key, parts in self._outputs.items():
            if (output := self._joined(parts)) is None:
                left_out.add(key[0])
                continue
            chosen = self._joined(self._choices.get(key, []))
            if chosen is not None:
                self._observer.take_choice(*key, chosen)
            self._observer(*key, output)
        return left_out

    def _joined(self, parts: list[torch.Tensor]) -> torch.Tensor | None:
        if len(parts) != self._steps or any(part.shape != parts[0].shape for part in parts):
            return None
        dim = 1 if parts[0].ndim > 2 else 0
        return torch.cat(parts, dim) if parts[0].ndim > 1 and parts[0].shape[dim] == 1 else None


def _new_cache(module: nn.Module) -> Any:
    """Return a cache for a model that takes one and does not return it, or None for the first call of other models."""
    config = getattr(module, "config", None)
    if getattr(config, "model_type", None) not in _RETURN_NONE:
        return None
    from transformers import DynamicCache

    return DynamicCache(config=config)


def stepwise(
    batch: Batch, module: nn.Module, begin_step: Callable[[int, int], None] = ignore, why: str = "decode=yes"
) -> Callable[[], Any]:
    """Return a function that runs the model on each token of a batch of one sequence. It returns what the model returns, with the
    main output of all tokens and nothing else. begin_step: called before each token with the numbers of finished and of all
    tokens. why: what needs this, for errors. Raises UserError for other inputs than tokens; the function raises it for a model that
    keeps no KV cache.
    """
    ids, mask = batch.kwargs.get(_IDS), batch.kwargs.get(_MASK)
    if batch.args or not isinstance(ids, torch.Tensor) or set(batch.kwargs) - {_IDS, _MASK, "use_cache"}:
        raise UserError(f"{why} runs inputs of tokens alone: give texts, or tensors named input_ids")
    if len(ids) != 1:
        raise UserError(f"{why} runs one sequence at a time, and these inputs have {len(ids)} in one batch")

    accepted = inspect.signature(module.forward).parameters
    argument = next((name for name in _CACHES if name in accepted), "past_key_values")

    def call() -> Any:
        cache = _new_cache(module)
        outputs: list[torch.Tensor] = []
        name, output = "", None
        for token in range(ids.shape[1]):
            begin_step(token, ids.shape[1])
            kwargs = {_IDS: ids[:, token : token + 1], argument: cache, "use_cache": True}
            output = module(**kwargs, **({} if mask is None else {_MASK: mask[:, : token + 1]}))
            cache = next((found for each in _CACHES if (found := getattr(output, each, None)) is not None), cache)
            if cache is None:
                raise UserError(f"{why}: {type(module).__name__} returns no KV cache, so it can't run token by token")
            name, main = main_output(output)
            outputs.append(main)
        made: Any = type(output) if dataclasses.is_dataclass(output) else dict
        return made(**{name: torch.cat(outputs, 1)})

    return call
