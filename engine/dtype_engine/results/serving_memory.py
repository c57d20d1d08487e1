"""How much memory serving a model takes, in bytes, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from dtype_engine.core.text import Name


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """The memory of activations at the peak of a forward pass over a whole prompt, without weights and KV cache."""

    nbytes: int
    module: Name
    """The module that runs at the peak; "" if it is the model itself."""
    context: int
    """The number of tokens of each sequence."""
    batch: int
    """The number of sequences."""
    estimated: bool
    """Whether this is an upper estimate, made without running the model. Otherwise it was measured."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """What a model reads to generate one token of one sequence, and the least time that this takes."""

    active_bytes: int | None
    """The expected bytes of weights, scales included. None if they are unknown."""
    what: str
    """Which weights are read, in words for the user, or why that is unknown."""
    cache_bytes: int
    """The bytes of the KV cache after `ServingMemory.context` tokens."""
    bandwidth: float | None = None
    """The bandwidth of the memory in bytes per second, if the user gives one."""
    milliseconds: float | None = None
    """The least time for `active_bytes`. None if these or the bandwidth are unknown."""
    milliseconds_with_cache: float | None = None
    """The least time for `active_bytes` and `cache_bytes`."""


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """The memory that a model takes when it serves `batch` sequences of `context` tokens."""

    model: str
    context: int
    batch: int
    weights_bytes: int
    """Bytes of the weights under the recipe, scales included."""
    kv_bytes: int
    """Bytes of the keys and values of all layers, and of the states of recurrent layers."""
    kv_bytes_per_token: int
    """Bytes by which the KV cache of one sequence grows with one more token after `context` tokens."""
    kv_dtypes: tuple[str, ...]
    """The formats of the KV cache's tensors, sorted by bytes, largest first. Empty if the model keeps no cache."""
    activations: ActivationMemory | None = None
    notes: tuple[str, ...] = ()
    """Sentences about what is not known, and which sizes are therefore missing or only upper bounds."""
    budget: int | None = None
    largest_context: int | None = None
    """The largest number of tokens that fits in the budget; 0 if one token does not fit. None without a budget."""
    most_sequences: int | None = None
    """How many sequences of `context` tokens the KV caches of fit in the budget, beside the weights and the activations. None
    without a budget or without a KV cache.
    """
    longest: int | None = None
    """The maximum length of a sequence in tokens, if the model's configuration names it."""
    decoding: Decoding | None = None
    """What a token reads, and how long that takes at least, if it was computed."""

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + (self.activations.nbytes if self.activations is not None else 0)

    @property
    def fits(self) -> bool | None:
        """Whether `total_bytes` is at most `budget`. None without a budget."""
        return None if self.budget is None else self.total_bytes <= self.budget
