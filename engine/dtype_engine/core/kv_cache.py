"""The tensors of a model's KV cache and their sizes. Does not import torch. `checkpoint/kv_cache.py` finds them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dtype_engine.core import dtypes
from dtype_engine.core.text import Name

KV_CACHE = "kv_cache"
"""The label of the child of an attention module that holds its cache, as in `model.layers.0.self_attn.kv_cache.k`."""
PARTS = ("k", "v", "latent", "rope", "indexer", "conv_state", "ssm_state")
"""What a tensor of the cache may hold: keys and values, MLA's latent and rotary part, the keys of a sparse attention's indexer, and
the two states of a recurrent layer.
"""


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One tensor of the cache, such as the keys of one layer."""

    name: Name
    """`{module}.kv_cache.{part}`, where module is the attention module's name in the tree."""
    layer: int
    """The layer's index in transformers' cache, which is the module's `layer_idx`."""
    per_token: int = 0
    """Elements for one token of one sequence: heads x head_dim for keys and values. 0 for recurrent states."""
    heads: int = 1
    """The number of heads that share `per_token` equally. 1 if the heads have one common tensor, as the latent of MLA."""
    fixed: int = 0
    """The number of elements for one sequence of a recurrent state, whose size does not depend on the number of tokens. 0 for keys
    and values.
    """
    window: int | None = None
    """The number of tokens that a query attends to, itself included, if the layer has a sliding window or chunks."""
    shared_with: Name | None = None
    """The cache tensor of another layer that this layer reads instead of one of its own; it then takes no memory."""
    source: Literal["decoder", "encoder"] = "decoder"
    """Whether the tensor holds keys and values of the decoder's own tokens or, in cross attention, of the encoder's tokens."""
    length: int | None = None
    """For cross attention, the number of the encoder's tokens if the model fixes it, as Whisper does; otherwise None."""

    @property
    def module(self) -> str:
        """The name of the attention module or recurrent layer."""
        return self.name.rsplit(".", 2)[0]

    @property
    def part(self) -> str:
        """What the tensor holds: one of `PARTS`."""
        return self.name.rpartition(".")[2]

    @property
    def castable(self) -> bool:
        """Whether a rule may give the tensor a format."""
        return self.shared_with is None and self.part in ("k", "v", "latent", "rope")

    def tokens(self, context: int, encoder_tokens: int | None = None) -> int:
        """Return how many tokens of each sequence the tensor keeps. context: tokens that the decoder has seen. encoder_tokens:
        tokens that the encoder has seen; None means as many as `context`.
        """
        if self.shared_with is not None:
            return 0
        if self.source == "encoder":
            return self.length or (context if encoder_tokens is None else encoder_tokens)
        # The token that is being decoded is the last of its window, so that transformers keeps one less.
        return context if self.window is None else min(context, self.window - 1)

    def shape(self, context: int, batch: int = 1, encoder_tokens: int | None = None) -> tuple[int, int, int, int]:
        """Return (batch, heads, tokens, width) for `batch` sequences of `context` tokens. A recurrent state is one token."""
        if self.fixed:
            return batch, 1, 0 if self.shared_with else 1, self.fixed
        return batch, self.heads, self.tokens(context, encoder_tokens), self.per_token // self.heads

    def elements(self, context: int, batch: int = 1, encoder_tokens: int | None = None) -> int:
        """Return the number of elements for `batch` sequences of `context` tokens."""
        return math.prod(self.shape(context, batch, encoder_tokens))

    def nbytes(self, dtype: str, context: int, batch: int = 1, encoder_tokens: int | None = None) -> int:
        """Return the bytes of the elements in `dtype`, without scales. The state of a recurrence is always in float32, as in
        transformers.
        """
        bits = 32 if self.part == "ssm_state" else dtypes.BY_NAME[dtype].bits
        return self.elements(context, batch, encoder_tokens) * bits // 8


@dataclass(frozen=True, slots=True)
class KVCache:
    """All tensors of a model's cache, in the order of the tree."""

    tensors: tuple[KVCacheTensor, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences about what the files don't tell, and what is therefore missing or an upper bound."""
    none_because: str | None = None
    """Why the model keeps no cache, as a sentence, or None if it keeps one."""
    declared: tuple[tuple[str, str, str], ...] = ()
    """The formats that `config.json` declares: (the name of the attention module, or "" for all; the part, or "" for both; the
    format).
    """
    dtype: str | None = None
    """The dtype in which the model computes, as its configuration says, or None if it does not say."""
    longest: int | None = None
    """The number of tokens for which the model was made, as its configuration says, or None if it does not say."""

    def nbytes(self, dtype: str, context: int, batch: int = 1, encoder_tokens: int | None = None) -> int:
        """Return the bytes of all tensors if all are in `dtype`, without scales."""
        return sum(tensor.nbytes(dtype, context, batch, encoder_tokens) for tensor in self.tensors)
