"""Finds the positions of a batch that are compared: all except those that a mask marks as padding.

A mask has the shape [batch, positions], with 1 for each position to compare. In an encoder-decoder model, the decoder has its own
positions. A mask that leaves out no position is replaced by None, so that outputs are compared without copying positions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.libraries.torch_private import is_wrapped

_POSITION_OUTPUTS = ("start_logits",)
"""Names of outputs with one number for each position, [batch, positions]."""
_CROSS_ATTENTION = re.compile(
    r"(EncDecAttention|encoder_attn|cross_attn|crossattention)\b.*\b(k|v|k_proj|v_proj|key|value)$"
)
"""Matches the names of decoder modules that process the encoder's output: the key and value projections of cross-attention."""


class AttendedPositions:
    """Collects the `key_padding_mask` of each call of `nn.MultiheadAttention` that is self-attention, during one forward pass."""

    def __init__(self) -> None:
        self.masks: dict[tuple[int, ...], torch.Tensor | None] = {}
        """Bool masks that are True at the positions that are not padding, keyed by shape. If two calls had different masks of one
        shape, the entry is None. With `batch_first=False`, each mask is included as [batch, positions] and as [positions, batch],
        because the model's output may have either order.
        """

    def add(
        self,
        attention: nn.MultiheadAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        *_: object,
        **__: object,
    ) -> None:
        """Add a call of `attention` with the arguments of its `forward`, if it is self-attention. A boolean mask is True at
        padding, and a mask of floats is -inf there.
        """
        if query is not key or query.ndim != 3 or is_wrapped(query):
            return
        if key_padding_mask is None:
            kept = torch.ones(query.shape[:2], dtype=torch.bool, device=query.device)
            kept = kept if attention.batch_first else kept.T
        else:
            kept = ~key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask > -torch.inf
        for mask in (kept,) if attention.batch_first else (kept, kept.T):
            shape = tuple(mask.shape)
            known = self.masks.get(shape, mask)
            self.masks[shape] = known if known is not None and torch.equal(known, mask) else None


@dataclass(frozen=True, slots=True)
class KeptPositions:
    """Masks of the positions of a batch to compare, bool [batch, positions], on the model's device. There is at least one mask."""

    encoder: torch.Tensor | None
    """The mask of the encoder's positions in an encoder-decoder model, and of all positions in other models."""
    decoder: torch.Tensor | None
    """The mask of the decoder's positions in an encoder-decoder model."""
    has_decoder: bool
    attended: Mapping[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    """Masks that the model passed to torch's attention, keyed by shape. They are used if the batch contains no mask."""

    @classmethod
    def of(
        cls, module: nn.Module, batch: Batch, device: torch.device, attended: AttendedPositions
    ) -> KeptPositions | None:
        """Return the positions to compare according to the masks in `batch` or, if the batch has none, according to the masks that
        the model passed to torch's attention (`attended`). Returns None if all positions are to be compared.

        The masks are the attention mask and, in an encoder-decoder model, the decoder's attention mask and the labels: a label of
        -100 leaves out its position. module: the model, whose signature names the batch's positional arguments.
        """
        given = _arguments(module, batch)
        has_decoder = bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))
        encoder, decoder = _ones(given.get("attention_mask")), None
        if has_decoder:
            decoder, labels = _ones(given.get("decoder_attention_mask")), given.get("labels")
            if isinstance(labels, torch.Tensor) and labels.ndim == 2:
                named = labels != -100
                decoder = named & decoder if decoder is not None and decoder.shape == labels.shape else named
        encoder, decoder = _on(device, encoder), _on(device, decoder)
        if encoder is not None or decoder is not None:
            return cls(encoder, decoder, has_decoder)
        observed = {shape: mask for shape, each in attended.masks.items() if (mask := _on(device, each)) is not None}
        return cls(None, None, has_decoder, observed) if observed else None

    def of_main(self, name: str, output: torch.Tensor) -> torch.Tensor | None:
        """Return the mask for the main output `name`, or None if all its positions are compared."""
        mask = self._mask(self.has_decoder, output)
        has_positions = output.ndim > 2 or name in _POSITION_OUTPUTS
        return mask if mask is not None and has_positions and output.shape[:2] == mask.shape else None

    def of_module(self, name: str, call: int, output: torch.Tensor) -> torch.Tensor | None:
        """Return the mask for a module's output, or None if all its rows are compared, for example because they are not positions.
        The mask is [batch, positions] for an output [batch, positions, ...], and [batch x positions] for an output in which these
        two dimensions are flattened into one. call: the number of the module's call in the forward pass, from 0.
        """
        mask = self._mask(self.has_decoder and _is_of_decoder(name, call), output)
        if mask is None or output.ndim < 2:
            return None
        if output.ndim > 2 and output.shape[:2] == mask.shape:
            return mask
        return mask.reshape(-1) if len(output) == mask.numel() else None

    def of_cache(self, of_decoder: bool, states: torch.Tensor) -> torch.Tensor | None:
        """Return the mask [batch, tokens] for what is written into a KV cache (`states`, [batch, heads, tokens, width]), or None if
        all tokens count. of_decoder: whether they are tokens of the decoder of an encoder-decoder model, and not of its encoder.
        """
        mask = self.decoder if self.has_decoder and of_decoder else self.encoder
        return mask if mask is not None and (len(states), states.shape[-2]) == mask.shape else None

    def _mask(self, of_decoder: bool, output: torch.Tensor) -> torch.Tensor | None:
        return self.attended.get(tuple(output.shape[:2]), self.decoder if of_decoder else self.encoder)


def _is_of_decoder(name: str, call: int) -> bool:
    """Return whether the rows of a module's output are positions of the decoder (and not of the encoder)."""
    if "decoder" in name or "encoder" in name:
        return "decoder" in name and _CROSS_ATTENTION.search(name) is None
    return call > 0 or name == "lm_head"  # the first call of an embedding that both share is the encoder's


def _arguments(module: nn.Module, batch: Batch) -> dict[str, Any]:
    if not batch.args:
        return batch.kwargs
    try:
        return inspect.signature(module.forward).bind_partial(*batch.args, **batch.kwargs).arguments
    except TypeError:
        return batch.kwargs


def _ones(mask: object) -> torch.Tensor | None:
    """Return a mask that is True where `mask` [batch, positions] is 1, or None if `mask` is no such tensor of zeros and ones."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or not bool(((mask == 0) | (mask == 1)).all()):
        return None
    return mask == 1


def _on(device: torch.device, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Move a mask to a device. Returns None if it is True everywhere or nowhere, since then all positions are compared."""
    return None if mask is None or bool(mask.all()) or not bool(mask.any()) else mask.to(device)
