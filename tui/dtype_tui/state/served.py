"""How the model is to be served: the KV caches and the activations for which the app shows the memory."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from dtype_engine.recipe.serving_memory import interpolated
from dtype_tui.state.cache_nodes import CacheNodes

if TYPE_CHECKING:
    from dtype_engine.results.serving_memory import ActivationMemory, ServingMemory


class Served(msgspec.Struct):
    context: int | None = None
    """The tokens in each sequence, or None for `default_context` of the model."""
    batch: int = 1
    """The number of sequences."""
    budget: int | None = None
    """The bytes in which weights, KV cache and activations together are to fit, or None."""
    peaks: tuple[ActivationMemory, ...] = ()
    """The memory of activations at several contexts, or () while it is unknown."""
    caches: CacheNodes = msgspec.field(default_factory=dict)
    """The cache tensors at or below each node of a KV cache, by the node's name."""
    known: tuple[object, ServingMemory] | None = None
    """(the values from which memory was computed last, this memory)."""

    def activations(self, context: int) -> ActivationMemory:
        """Return the memory of activations at `context` tokens, interpolated between the contexts in `peaks`."""
        known = {peak.context: peak.nbytes for peak in self.peaks}
        return dataclasses.replace(self.peaks[0], nbytes=max(0, round(interpolated(known, context))), context=context)
