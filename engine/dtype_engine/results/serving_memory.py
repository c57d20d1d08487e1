"""The memory that serving a model takes, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from dtype_engine.core.text import Name


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """The memory that a pass over a whole prompt needs at its peak, beside the weights and the KV cache that it leaves."""

    nbytes: int
    module: Name
    """The module that runs at the peak; "" if it is the model itself."""
    context: int
    """The number of tokens of each sequence."""
    batch: int
    """The number of sequences."""
    estimated: bool
    """Whether this is an upper estimate that was made without running the model. Otherwise it was measured in a pass."""


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """The memory that serving a model takes at a context and a batch, in bytes."""

    model: str
    context: int
    """The number of tokens of each sequence."""
    batch: int
    """The number of sequences."""
    weights_bytes: int
    """The weights under the recipe, scales included."""
    kv_bytes: int
    """The KV cache: keys and values of all layers, and the states of recurrent layers."""
    kv_bytes_per_token: int
    """How much the KV cache of one sequence grows by one more token at this context."""
    kv_dtypes: tuple[str, ...]
    """The formats of the KV cache, that of the most bytes first. Empty if the model keeps none."""
    activations: ActivationMemory | None = None
    notes: tuple[str, ...] = ()
    """Sentences about what is not known, and what is therefore missing or an upper bound."""
    budget: int | None = None
    largest_context: int | None = None
    """The most tokens for which all fits in the budget; 0 if nothing fits. None without a budget."""
    longest: int | None = None
    """The number of tokens for which the model was made, as its configuration says, or None if it does not say."""

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + (self.activations.nbytes if self.activations is not None else 0)

    @property
    def fits(self) -> bool | None:
        """Whether all fits in the budget at this context. None without a budget."""
        return None if self.budget is None else self.total_bytes <= self.budget
