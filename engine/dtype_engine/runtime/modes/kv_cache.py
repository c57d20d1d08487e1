"""Intercepts what a forward pass writes into KV caches, and rounds it to the formats of a recipe. Also rounds queries, if a format
says so.

transformers' models write keys and values by `Cache.update(keys, values, layer)`, and attend to what it returns. MLA writes its
latent vector and its rotary key in the same way. Formats with static scales or with a scale per token are applied to what is
written. Every token is thus rounded once, no matter whether tokens are processed together or one by one. KIVI is applied to what is
read, since its groups contain many tokens. States of recurrent layers are rounded after each call of the model
(`recurrent_states.py`).

Queries are intercepted where a model calls the kernel of its attention, which it looks up by transformers' `AttentionInterface`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dtype_engine.core.kv_cache import KVCacheTensor
from dtype_engine.core.kv_formats import KV_FORMATS
from dtype_engine.runtime.libraries.hf_private import attention_queries_by, cache_updates_by
from dtype_engine.runtime.libraries.torch_private import WithoutModes
from dtype_engine.runtime.modes.recurrent_states import StateRounding
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.numerics.kv_rounding import head_amax, round_cache, round_queries

CACHE_FIELDS = ("cache", "past_key_values", "cache_params")
"""The names by which transformers' models take and return a cache: the first from 5.24 on, before that one of the others."""
CacheNames = Mapping[str, tuple[str, ...]]
"""Maps the name of each attention module to the names of its cache tensors, such as `model.layers.0.self_attn.kv_cache.k` and
`….v`, in the order of the arguments of `Cache.update`.
"""


class CacheWatcher:
    """Intercepts what a forward pass writes into KV caches, what it reads from them, and the queries. This base class returns
    everything unchanged. module: the name of the attention module. part: 0 for keys, 1 for values.
    """

    takes_queries: bool = False
    """Whether `asked` is to be called."""

    def asked(self, module: str, queries: torch.Tensor) -> torch.Tensor:
        """Return the tensor that attention uses instead of `queries`: [batch, heads, tokens, width]."""
        return queries

    @property
    def unseen(self) -> list[str]:
        """The names of the keys that the pass has written, but whose queries it should have given to `asked`, and did not."""
        return []

    def written(self, module: str, part: int, states: torch.Tensor, finished: int) -> torch.Tensor:
        """Return what to store instead of the keys or values `states` of new tokens: [batch, heads, tokens, width]. part: 0 for
        keys, 1 for values. finished: how many module calls have ended.
        """
        return states

    def read(self, module: str, part: int, states: torch.Tensor) -> torch.Tensor:
        """Return the tensor that attention uses instead of `states`, the cached keys (`part` 0) or values (1) of all tokens."""
        return states

    def around(self, module: nn.Module) -> AbstractContextManager[object]:
        """Return a context for a pass of a model, in which its calls may be intercepted, too."""
        return nullcontext()


@dataclass
class CacheRounding(CacheWatcher):
    """Rounds KV caches to the formats of a recipe during one forward pass."""

    names: CacheNames
    formats: Mapping[str, str]
    """The format of each cache tensor that is rounded, keyed by the tensor's name."""
    amax: Mapping[str, torch.Tensor]
    """The calibrated largest |value| of each head, float32 [heads], keyed by the name of the cache tensor."""
    inside: Callable[[str], bool] = lambda name: True
    """Returns whether to round the cache tensor with a given name. By default, all that have a format are rounded."""
    keys_read: Mapping[str, str] = field(default_factory=dict)
    """The names of the cache tensors with the keys that attention modules read, keyed by the module."""
    first_use: dict[str, int] = field(default_factory=dict)
    """How many module calls had ended before a cache tensor with a format was first written, keyed by the tensor's name."""
    states: Sequence[KVCacheTensor] = ()
    """All states that the model's recurrent layers keep, if some of them have a format."""
    overflowing: set[str] = field(default_factory=set)
    """As in `StateRounding`."""
    seen: set[str] = field(default_factory=set)
    """The names of the keys for whose formats queries were intercepted."""
    takes_queries: bool = field(init=False)

    def __post_init__(self) -> None:
        self.takes_queries = any(KV_FORMATS[form].queries for form in self.formats.values())

    def around(self, module: nn.Module) -> AbstractContextManager[object]:
        if not self.states:
            return nullcontext()
        rounding = StateRounding(self.states, self.formats, self.inside, self.first_use, self.overflowing)

        def ended(called: nn.Module, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
            watch = _watching.get()
            if watch is not None and watch[0] is self:  # passes of several threads may take turns
                with WithoutModes():
                    rounding.after(called, given, output)

        return module.register_forward_hook(ended, with_kwargs=True)

    def asked(self, module: str, queries: torch.Tensor) -> torch.Tensor:
        name = self.keys_read.get(module, "")
        if name not in self.formats or not KV_FORMATS[self.formats[name]].queries:
            return queries
        self.seen.add(name)
        return round_queries(queries) if self.inside(name) else queries

    @property
    def unseen(self) -> list[str]:
        keys = (name for names in self.names.values() for name in names[:1] if name in self.first_use)
        return [name for name in keys if KV_FORMATS[self.formats[name]].queries and name not in self.seen]

    def written(self, module: str, part: int, states: torch.Tensor, finished: int) -> torch.Tensor:
        if (name := self._name(module, part)) is None:
            return states
        self.first_use.setdefault(name, finished)
        form = KV_FORMATS[self.formats[name]]
        if form.scales == "kivi" or not self.inside(name):
            return states
        return round_cache(states, form.name, part == 0, self.amax.get(name))

    def read(self, module: str, part: int, states: torch.Tensor) -> torch.Tensor:
        name = self._name(module, part)
        if name is None or KV_FORMATS[self.formats[name]].scales != "kivi" or not self.inside(name):
            return states
        return round_cache(states, self.formats[name], part == 0)

    def _name(self, module: str, part: int) -> str | None:
        names = self.names.get(module, ())
        return names[part] if part < len(names) and names[part] in self.formats else None


@dataclass
class CacheAmax(CacheWatcher):
    """Records the largest |value| of each head in every cache tensor, for formats with calibrated scales."""

    names: CacheNames
    found: dict[str, torch.Tensor] = field(default_factory=dict)
    """The largest |value| of each head until now, float32 [heads], keyed by the name of the cache tensor."""
    kept_of: Callable[[str, torch.Tensor], torch.Tensor | None] = lambda name, states: None
    """Returns which tokens of what is written into a cache tensor count, bool [batch, tokens], or None if all do."""

    def written(self, module: str, part: int, states: torch.Tensor, finished: int) -> torch.Tensor:
        for name in self.names.get(module, ())[part : part + 1]:
            kept = self.kept_of(name, states)
            counted = states if kept is None else states.masked_fill(~kept.to(states.device)[:, None, :, None], 0)
            amax = head_amax(counted)
            self.found[name] = torch.maximum(self.found.get(name, amax), amax)
        return states


_watching: ContextVar[tuple[CacheWatcher, WeightMode] | None] = ContextVar("_watching", default=None)


@contextmanager
def watching_caches(watcher: CacheWatcher, mode: WeightMode) -> Iterator[None]:
    """Let `watcher` intercept the KV caches that the current thread writes and reads during the `with` block, which must be inside
    a block of `watched_caches`. mode: the mode of the forward pass, which knows the running module.
    """
    before = _watching.set((watcher, mode))
    try:
        yield
    finally:
        _watching.reset(before)


def watched_caches() -> AbstractContextManager[None]:
    """Return a context in which a thread's reads and writes of KV caches go to the watcher that `watching_caches` has set."""
    return cache_updates_by(_update)


def watched_queries() -> AbstractContextManager[None]:
    """Return a context in which a thread's queries go to the watcher that `watching_caches` has set."""
    return attention_queries_by(_ask)


def _ask(queries: torch.Tensor) -> torch.Tensor:
    if (watch := _watching.get()) is None:
        return queries
    watcher, mode = watch
    with WithoutModes():
        return watcher.asked(mode.module, queries)


def _update(update: Callable[..., Any], keys: torch.Tensor, values: torch.Tensor) -> Any:
    if (watch := _watching.get()) is None:
        return update(keys, values)
    watcher, mode = watch
    with WithoutModes():
        keys, values = (
            watcher.written(mode.module, part, states, mode.finished) for part, states in enumerate((keys, values))
        )
    stored = update(keys, values)
    with WithoutModes():
        return tuple(watcher.read(mode.module, part, states) for part, states in enumerate(stored))
