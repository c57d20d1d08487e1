"""Finds the positions of a batch that are compared: all except those that a mask marks as padding.

A mask has the shape [batch, positions], with 1 for each position to compare. In an encoder-decoder model, the decoder has its own
positions. Some of them are left out by the decoder's mask, and by labels of -100. A mask that leaves out no position is replaced by
None. Outputs are then compared without copying the positions to compare.
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
"""Names of outputs with one number for each position, [batch, positions]."""
_DECODER = re.compile("decoder")
_CROSS_ATTENTION = re.compile(
    r"(EncDecAttention|encoder_attn|cross_attn|crossattention)\b.*\b(k|v|k_proj|v_proj|key|value)$"
)
"""Matches the names of decoder modules that process the encoder's output: the key and value projections of cross-attention."""


@dataclass(frozen=True, slots=True)
class KeptPositions:
    """Masks that are True at the positions of a batch to compare: bool [batch, positions] on the model's device. At least one is
    not None.
    """

    encoder: torch.Tensor | None
    """The mask of the encoder's positions in an encoder-decoder model, and of all positions in other models. None if all are
    compared.
    """
    decoder: torch.Tensor | None
    """The mask of the decoder's positions in an encoder-decoder model, or None if all are compared. None in other models."""
    has_decoder: bool

    @classmethod
    def of(cls, module: nn.Module, batch: Batch, device: torch.device) -> KeptPositions | None:
        """Return the positions to compare according to the masks in `batch`, or None if these are all positions.

        The masks are the attention mask and, in an encoder-decoder model, the decoder's attention mask and the labels: a label of
        -100 leaves out its position. module: the model, whose signature names the batch's positional arguments.
        """
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
        """Return the mask for the main output `name`, or None if all its positions are compared."""
        mask = self.decoder if self.has_decoder else self.encoder
        has_positions = output.ndim > 2 or name in _POSITION_OUTPUTS
        return mask if mask is not None and has_positions and output.shape[:2] == mask.shape else None

    def of_module(self, name: str, call: int, output: torch.Tensor) -> torch.Tensor | None:
        """Return the mask for a module's output, or None if all its rows are compared, for example because they are not positions.

        The mask is [batch, positions] for an output [batch, positions, ...], and [batch x positions] for an output in which these
        two dimensions are flattened into one. name: the name of the module. call: the number of its call in the forward pass, from
        0.
        """
        mask = self.decoder if self.has_decoder and _is_of_decoder(name, call) else self.encoder
        if mask is None or output.ndim < 2:
            return None
        if output.ndim > 2 and output.shape[:2] == mask.shape:
            return mask
        return mask.reshape(-1) if len(output) == mask.numel() else None


def _is_of_decoder(name: str, call: int) -> bool:
    """Return whether the rows of a module's output are positions of the decoder (and not of the encoder). name: the name of the
    module.

    call: the number of the module's call in the forward pass, from 0. If encoder and decoder share an embedding, its first call is
    the encoder's.
    """
    if _DECODER.search(name) or "encoder" in name:
        return _DECODER.search(name) is not None and _CROSS_ATTENTION.search(name) is None
    return call > 0 or name == "lm_head"


def _arguments(module: nn.Module, batch: Batch) -> dict[str, Any]:
    if not batch.args:
        return batch.kwargs
    try:
        return inspect.signature(module.forward).bind_partial(*batch.args, **batch.kwargs).arguments
    except TypeError:
        return batch.kwargs


def _ones(mask: object) -> torch.Tensor | None:
    """Return a bool tensor that is True where a mask [batch, positions] is 1. Returns None if `mask` is no tensor of zeros and ones
    with this shape.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or not bool(((mask == 0) | (mask == 1)).all()):
        return None
    return mask == 1


def _on(device: torch.device, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Move a mask to a device. Returns None if the mask is True everywhere, and also if it is True nowhere, since then all
    positions are compared.
    """
    return None if mask is None or bool(mask.all()) or not bool(mask.any()) else mask.to(device)
