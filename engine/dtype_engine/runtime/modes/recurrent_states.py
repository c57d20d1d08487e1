"""Rounds the states of recurrent layers to the formats of a recipe, after each call of a model.

A runtime reads a state in its format, computes the next token in float32, and writes the new state in its format. So a state is
rounded once for each token, and the errors add up over the tokens: a pass over a whole text has none of them. Models therefore run
token by token (`passes/stepwise.py`), and this module rounds what they keep when a call has ended: whatever wrote the state, also
in place, the next token reads it rounded. What the same call returns was computed from the unrounded state, as in a runtime.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dtype_engine.core.kv_cache import KVCacheTensor
from dtype_engine.core.kv_formats import KV_FORMATS, STOCHASTIC
from dtype_engine.runtime.numerics.state_rounding import round_state

_OUTPUTS = ("cache", "past_key_values", "cache_params", "state")
"""The names by which transformers' models return what they keep: its cache, or RWKV's list of tensors."""


@dataclass
class StateRounding:
    """Rounds the states of recurrent layers during one forward pass, or one text that a model generates."""

    states: Sequence[KVCacheTensor]
    """All states that the model keeps, in the order of its modules."""
    formats: Mapping[str, str]
    """The format of each state that is rounded, keyed by the tensor's name."""
    inside: Callable[[str], bool]
    """Returns whether to round the state with a given name, which has a format."""
    first_use: dict[str, int] = field(default_factory=dict)
    """0 for each state with a format that a call has kept, keyed by the tensor's name: the next token may depend on it in any
    module.
    """
    overflowing: set[str] = field(default_factory=set)
    """The names of states with values that became infinite, because their format has no numbers as large."""
    _seen: Any = field(default_factory=hashlib.sha256)
    """A digest of the tokens until now. Random numbers are drawn from it, so that they repeat with the same text."""

    def after(self, module: nn.Module, given: Mapping[str, Any], output: Any) -> None:
        """Round the states that a call of the model has left behind, in place. given: the keyword arguments of the call. output:
        what it returned.
        """
        if STOCHASTIC in self.formats.values():  # reading the tokens would make another device wait
            ids = given.get("input_ids")
            self._seen.update(ids.cpu().numpy().tobytes() if isinstance(ids, torch.Tensor) else b"no tokens")
        for name, kept in kept_states(module, output, self.states):
            if name not in self.formats:
                continue
            self.first_use[name] = 0
            if self.inside(name):
                for number, state in enumerate(kept):
                    rounded = round_state(state, self.formats[name], self._random(f"{name} {number}"))
                    if KV_FORMATS[self.formats[name]].dtype == "float16" and bool(
                        (rounded.isinf() & ~state.isinf()).any()
                    ):
                        self.overflowing.add(name)
                    state.copy_(rounded)

    def _random(self, what: str) -> Callable[[torch.Size], torch.Tensor]:
        """Return a function that draws numbers in [0, 1), which depend on the text `what` and the tokens until now alone."""
        seed = hashlib.sha256(self._seen.digest() + what.encode()).digest()

        def draw(shape: torch.Size) -> torch.Tensor:
            generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "little"))
            return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")

        return draw


def kept_states(
    module: nn.Module, output: Any, states: Iterable[KVCacheTensor]
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield (name, tensors [batch, ...]) of those `states` that a model keeps when a call of it has returned `output`. A state may
    consist of several tensors, as that of two convolutions.
    """
    cache = next((found for name in _OUTPUTS if (found := getattr(output, name, None)) is not None), None)
    by_place: defaultdict[tuple[int, str], list[KVCacheTensor]] = defaultdict(list)
    for state in states:
        by_place[state.layer, state.part].append(state)
    for (layer, part), of_place in by_place.items():
        kept = _of_layer(cache, layer, part) or _of_module(module, of_place[0])
        for state in of_place:
            taken, elements = list[torch.Tensor](), 0
            while kept and elements < state.fixed:
                taken.append(kept.pop(0))
                elements += taken[-1][0].numel()
            if elements == state.fixed:
                yield state.name, taken


def _of_layer(cache: Any, layer: int, part: str) -> list[torch.Tensor]:
    """Return the states of a layer in a cache, in the order of the modules that write them: those of transformers' cache layers, of
    RWKV's list [channels, layers] or of MiniMax's list of layers.
    """
    if isinstance(
        cache, list
    ):  # RWKV: the last inputs of the feed-forward and of the attention, then the states of the attention
        found = [cache[1], cache[0]] if part == "conv_state" else cache[2:]
        return [each[:, :, layer] for each in found]
    layers, linear = getattr(cache, "layers", ()), getattr(cache, "linear_cache", ())
    if part == "ssm_state" and layer < len(linear) and isinstance(linear[layer], torch.Tensor):
        return [linear[layer]]
    held = (
        getattr(layers[layer], "conv_states" if part == "conv_state" else "recurrent_states", None)
        if layer < len(layers)
        else None
    )
    return [each for each in (held.values() if isinstance(held, dict) else [held]) if isinstance(each, torch.Tensor)]


def _of_module(module: nn.Module, state: KVCacheTensor) -> list[torch.Tensor]:
    """Return a state that a module itself keeps, as RecurrentGemma's do."""
    block: Any = module.get_submodule(state.module)
    held = (
        getattr(block, "conv1d_state", None)
        if state.part == "conv_state"
        else getattr(getattr(block, "rg_lru", None), "recurrent_states", None)
    )
    return [held] if isinstance(held, torch.Tensor) else []
