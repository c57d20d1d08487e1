"""The tensors of a model's KV cache and their sizes. `checkpoint/kv_cache.py` finds them."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from dtype_engine.core import dtypes
from dtype_engine.core.text import Name, printable

KV_CACHE = "kv_cache"
"""The child that an attention module has in the tree for its cache, as in `model.layers.0.self_attn.kv_cache.k`."""
STATES = ("conv_state", "ssm_state")
"""The parts that recurrent layers keep: the last inputs of a convolution, and the state of the recurrence itself."""
PARTS = ("k", "v", "latent", "rope", "indexer", *STATES)
"""What a tensor may hold: keys and values, MLA's latent and rotary part, the keys of a sparse attention's indexer, and `STATES`."""


class KVCacheTensor(msgspec.Struct, frozen=True):
    """One tensor of the cache, such as the keys of one layer."""

    name: Name
    """`{module}.kv_cache.{part}`, where module is the attention module's name in the tree."""
    layer: int
    """The layer's index in transformers' cache, which is the module's `layer_idx`."""
    per_token: int = 0
    """Elements for one token of one sequence: heads x head_dim for keys and values. 0 for recurrent states."""
    heads: int = 1
    """The heads among which `per_token` is divided equally. 1 if all heads share the elements, as MLA's latent."""
    fixed: int = 0
    """Elements of a recurrent state for one sequence, independent of the number of tokens. 0 for keys and values."""
    window: int | None = None
    """How many tokens a query attends to, its own included, if the layer has a sliding window or chunks; otherwise None."""
    state_dtype: str | None = None
    """The dtype in which transformers keeps a recurrent state whatever the model computes in, mostly float32, or None if it is the
    model's. A rule's format replaces it.
    """
    runs: int = 1
    """How often a pass runs the layer, each time with a cache of its own: more than once in models that loop, as HRM does."""
    shared_with: Name | None = None
    """The cache tensor of another layer that this layer reads, so that this tensor takes no memory. None if the layer has
    its own.
    """
    source: Literal["decoder", "encoder"] = "decoder"
    """The part of the model whose tokens have these keys and values: the encoder in cross attention."""
    length: int | None = None
    """The number of the encoder's tokens if the model fixes it for cross attention, as Whisper does."""

    @property
    def module(self) -> str:
        """The name of the attention module or recurrent layer."""
        return self.name.rsplit(".", 2)[0]

    @property
    def part(self) -> str:
        """One of `PARTS`."""
        return self.name.rpartition(".")[2]

    @property
    def is_state(self) -> bool:
        """Whether the tensor is a state of a recurrent layer, which has the same size for any number of tokens."""
        return self.part in STATES

    @property
    def castable(self) -> bool:
        """Whether a rule may give the tensor a format."""
        return self.why_no_format is None

    @property
    def why_no_format(self) -> str | None:
        """Why no rule may give the tensor a format, for the user, or None if one may."""
        if self.shared_with is not None:
            return f"the layer has no cache of its own, it reads {printable(self.shared_with)}"
        return "the keys of an indexer stay as they are" if self.part == "indexer" else None

    def tokens(self, context: int) -> int:
        """Return how many tokens the cache keeps for a sequence of `context` tokens; 0 if it reads another layer's cache. For cross
        attention without a fixed `length`, the encoder is taken to have `context` tokens, too.
        """
        if self.shared_with is not None:
            return 0
        if self.source == "encoder":
            return self.length or context
        # The token that is being decoded is the last of its window, so that transformers keeps one less.
        return context if self.window is None else min(context, self.window - 1)

    def shape(self, context: int, batch: int = 1) -> tuple[int, int, int, int]:
        """Return (batch x runs, heads, tokens, width), where `runs` is how often a pass runs the layer. For a recurrent state,
        heads and tokens are 1. batch: the number of sequences. context: as for `tokens`.
        """
        batch *= self.runs
        if self.fixed:
            return batch, 1, 0 if self.shared_with else 1, self.fixed
        return batch, self.heads, self.tokens(context), self.per_token // self.heads

    def elements(self, context: int, batch: int = 1) -> int:
        """Return the number of elements. The arguments are those of `shape`."""
        return math.prod(self.shape(context, batch))

    def nbytes(self, dtype: str, context: int, batch: int = 1) -> int:
        """Return the bytes of the tensor if its elements are in `dtype`, or in `state_dtype` if it has one, without scales.
        The other arguments are those of `shape`.
        """
        return self.elements(context, batch) * dtypes.BY_NAME[self.state_dtype or dtype].bits // 8


class KVCache(msgspec.Struct, frozen=True):
    """All tensors of a model's KV cache, in the order of the module tree."""

    tensors: tuple[KVCacheTensor, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences for the user: what the files do not tell, and which sizes are therefore missing or only upper bounds."""
    none_because: str | None = None
    """Why the model keeps no KV cache, or None if it keeps one."""
    declared: tuple[tuple[str, str, str], ...] = ()
    """The formats that `config.json` declares, as triples: the attention module's name, or "" for all; "k" or "v", or "" for
    both; and the format, such as "fp8", or what `config.json` calls it if it is none of `kv_formats.KV_FORMATS`.
    """
    dtype: str | None = None
    """The dtype in which the model computes, as its configuration says."""
    longest: int | None = None
    """The maximum length of a sequence in tokens, as the model's configuration says."""

    @property
    def of_tokens(self) -> tuple[KVCacheTensor, ...]:
        """The tensors that rules may give a format and that grow with the tokens, such as keys and values."""
        return tuple(tensor for tensor in self.tensors if tensor.castable and not tensor.is_state)

    @property
    def states(self) -> tuple[KVCacheTensor, ...]:
        """The states of recurrent layers."""
        return tuple(tensor for tensor in self.tensors if tensor.is_state)
