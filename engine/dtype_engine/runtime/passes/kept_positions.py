"""Which positions of a batch count: those that its masks do not leave out as padding.

A mask has the shape [batch, positions], 1 where a position counts. In an encoder-decoder model the decoder has positions of its
own, of which its mask and labels of -100 leave some out. Where nothing is left out there is no mask, and comparisons copy
nothing.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dtype_engine.runtime.inputs import Batch

_POSITION_OUTPUTS = ("start_logits",)
"""Outputs of one number a position, [batch, positions]."""
_DECODER = re.compile("decoder")
_CROSS_ATTENTION = re.compile(
    r"(EncDecAttention|encoder_attn|cross_attn|crossattention)\b.*\b(k|v|k_proj|v_proj|key|value)$"
)
"""Modules of a decoder whose rows are the encoder's positions."""


@dataclass(frozen=True, slots=True)
class KeptPositions:
    """The masks of one batch, bool [batch, positions] on the model's device; at least one is not None."""

    encoder: torch.Tensor | None
    """Of the encoder, or of the whole model where that has one stack of layers."""
    decoder: torch.Tensor | None
    """Of an encoder-decoder model's decoder."""
    has_decoder: bool

    @classmethod
    def of(cls, module: nn.Module, batch: Batch, device: torch.device) -> KeptPositions | None:
        """The masks among the arguments of a call; None where they leave nothing out."""
        given = _arguments(module, batch)
        has_decoder = bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))
        encoder, decoder = _ones(given.get("attention_mask")), None
        if has_decoder:
            decoder, labels = _ones(given.get("decoder_attention_mask")), given.get("labels")
            if isinstance(labels, torch.Tensor) and labels.ndim == 2:
                decoder = (
                    labels != -100 if decoder is None or decoder.shape != labels.shape else decoder & (labels != -100)
                )
        encoder, decoder = _on(device, encoder), _on(device, decoder)
        return None if encoder is None and decoder is None else cls(encoder, decoder, has_decoder)

    def of_main(self, name: str, output: torch.Tensor) -> torch.Tensor | None:
        """The mask of the main output `name`; None where nothing of it is left out."""
        mask = self.decoder if self.has_decoder else self.encoder
        has_positions = output.ndim > 2 or name in _POSITION_OUTPUTS
        return mask if mask is not None and has_positions and output.shape[:2] == mask.shape else None

    def of_module(self, name: str, call: int, output: torch.Tensor) -> torch.Tensor | None:
        """The mask of what a module returned: [batch, positions] for an output [batch, positions, ...], and [batch x positions] for
        one that has these in one dimension. None where nothing of it is left out, or its rows are no positions.
        """
        mask = self.decoder if self.has_decoder and _is_of_decoder(name, call) else self.encoder
        if mask is None or output.ndim < 2:
            return None
        if output.ndim > 2 and output.shape[:2] == mask.shape:
            return mask
        return mask.reshape(-1) if len(output) == mask.numel() else None


def _is_of_decoder(name: str, call: int) -> bool:
    """Whether the rows of a call's output are positions of the decoder. Both parts may share an embedding, which runs for the
    encoder first.
    """
    if _DECODER.search(name) or "encoder" in name:
        return _DECODER.search(name) is not None and _CROSS_ATTENTION.search(name) is None
    return call > 0 or name == "lm_head"


def _arguments(module: nn.Module, batch: Batch) -> dict[str, Any]:
    """The arguments of a call by name, as far as the module names them."""
    if not batch.args:
        return batch.kwargs
    try:
        return inspect.signature(module.forward).bind_partial(*batch.args, **batch.kwargs).arguments
    except TypeError:
        return batch.kwargs


def _ones(mask: object) -> torch.Tensor | None:
    """Where a mask [batch, positions] is 1; None where the value is no such mask."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or not bool(((mask == 0) | (mask == 1)).all()):
        return None
    return mask == 1


def _on(device: torch.device, mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask on a device; None where it leaves out nothing, or everything, so that there would be nothing to compare."""
    return None if mask is None or bool(mask.all()) or not bool(mask.any()) else mask.to(device)
