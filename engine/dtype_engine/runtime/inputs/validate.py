"""Checks whether the user's tensors fit a model's forward pass, before the model runs."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import nn

from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.runtime.formats.dequantize import dtype_name
from dtype_engine.runtime.inputs.batch import Batch, Inputs
from dtype_engine.runtime.inputs.preprocessing import learned_positions, text_config
from dtype_engine.runtime.model.live import LiveModel

ID_ARGUMENTS = ("input_ids", "decoder_input_ids", "token_type_ids")
_FLOAT_ARGUMENTS = ("pixel_values", "input_values", "input_features", "inputs_embeds")
_MASKS = {"attention_mask": "input_ids", "token_type_ids": "input_ids", "decoder_attention_mask": "decoder_input_ids"}


def check_fits(model: LiveModel, batch: Batch, where: str) -> None:
    """Check a batch against the signature of the model's forward pass and against its configuration.

    where: the words with which errors begin. Raises UserError for unknown and missing arguments and for tensors whose dtype or
    shape the model does not accept.
    """
    _check_names(model, batch, where)
    config = getattr(model.module, "config", None)
    if config is None:
        return  # the meaning of the user's own module's arguments is unknown
    for name, value in batch.kwargs.items():
        if not isinstance(value, torch.Tensor):
            continue
        if name in ID_ARGUMENTS:
            _check_ids(model, name, value, where)
        elif name in _FLOAT_ARGUMENTS and not value.is_floating_point():
            raise UserError(
                f"{where}: {name} is {dtype_name(value.dtype)}; the model takes it as floating-point figures, processed as its "
                "processor does"
            )
        if name == "pixel_values":
            _check_pixels(model, value, where)
        if name in ("input_values", "input_features"):
            _check_sound(config, name, value, where)
    for mask, of in _MASKS.items():
        one, other = batch.kwargs.get(mask), batch.kwargs.get(of)
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.ndim != 2:
            continue  # the meaning of masks with more dimensions depends on the model
        if one.shape != other.shape:
            raise UserError(f"{where}: {mask} is {_shape(one)} and {of} is {_shape(other)}: they must be the same")


def unknown_arguments(model: LiveModel, batch: Batch) -> tuple[list[str], list[str]]:
    """Return (the batch's keyword arguments that the forward pass does not take, the names that it takes)."""
    arguments = inspect.signature(model.module.forward).parameters
    kinds = {argument.kind for argument in arguments.values()}
    named = [
        name
        for name, argument in arguments.items()
        if argument.kind not in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL)
    ]
    # A transformers model passes unknown keyword arguments on, so a wrong name would have no effect and no error.
    closed = inspect.Parameter.VAR_KEYWORD not in kinds or (hasattr(model.module, "config") and named)
    return [name for name in batch.kwargs if closed and name not in named], named


def with_labels(model: LiveModel, inputs: Inputs) -> Inputs:
    """Return `inputs` after turning arguments that the forward pass does not take into labels for the user's metrics."""
    batches = tuple(batch.with_labels(unknown_arguments(model, batch)[0]) for batch in inputs.batches)
    return dataclasses.replace(inputs, batches=batches)


def _check_names(model: LiveModel, batch: Batch, where: str) -> None:
    unknown, named = unknown_arguments(model, batch)
    for name in unknown[:1]:
        raise UserError(
            f"{where}: the forward pass of {type(model.module).__name__} has no argument {printable(name)!r}; it takes "
            f"{', '.join(named[:12])}{', …' if len(named) > 12 else ''}"
        )
    signature = inspect.signature(model.module.forward)
    try:
        signature.bind(*batch.args, **batch.kwargs)
    except TypeError as error:
        raise UserError(f"{where} does not fit the forward pass of {type(model.module).__name__}: {error}") from None


def _check_ids(model: LiveModel, name: str, value: torch.Tensor, where: str) -> None:
    if value.is_floating_point() or value.dtype == torch.bool:
        raise UserError(f"{where}: {name} holds token ids, so it must be integers; it is {dtype_name(value.dtype)}")
    if value.ndim != 2:
        raise UserError(f"{where}: {name} is {_shape(value)}; it must be [batch, positions]")
    if not value.numel():
        raise UserError(f"{where}: {name} is {_shape(value)}: it has no tokens")
    rows = id_count(model, name)
    if rows is None:
        return
    low, high = int(value.min()), int(value.max())
    if low < 0 or high >= rows:
        wrong = low if low < 0 else high
        what = "segment ids" if name == "token_type_ids" else "vocabulary"
        raise UserError(f"{where}: {name} holds {wrong}, beyond the {what} of {model.title} (0 to {rows - 1})")
    positions = learned_positions(model.module)
    if name != "token_type_ids" and positions is not None and value.shape[1] > positions:
        raise UserError(
            f"{where}: {name} has {value.shape[1]} positions, and {model.title} has learned {positions}; give shorter sequences"
        )


def id_count(model: LiveModel, name: str) -> int | None:
    """Return how many different ids the argument `name` may hold (for `input_ids`, the vocabulary's size), or None if unknown."""
    config = model.module.config
    if name != "input_ids":
        decoder = getattr(config, "decoder", None) if name == "decoder_input_ids" else None
        size = "type_vocab_size" if name == "token_type_ids" else "vocab_size"
        return int(getattr(text_config(config) if decoder is None else decoder, size, None) or 0) or None
    try:
        embedding = model.module.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        embedding = None
    # In some models the ids of picture and audio tokens lie beyond the embedding, and features replace these tokens.
    special = [
        value
        for key in ("image_token_id", "image_token_index", "audio_token_id", "video_token_id")
        if isinstance(value := getattr(config, key, None), int)
    ]
    count = getattr(embedding, "num_embeddings", None) or getattr(text_config(config), "vocab_size", None)
    return max(int(count), *(token + 1 for token in special)) if count and special else int(count) if count else None


def _check_pixels(model: LiveModel, value: torch.Tensor, where: str) -> None:
    """Raise UserError if `pixel_values` (`value`) has the wrong dimensions or channels for a model with a convolution over
    pictures. where: the words with which the error begins.
    """
    vision = getattr(model.module.config, "vision_config", None) or model.module.config
    wanted = getattr(vision, "num_channels", None)
    if not isinstance(wanted, int):
        return
    flat = [m for m in model.module.modules() if isinstance(m, nn.Conv2d) and m.in_channels == wanted]
    if not flat:
        return
    if value.ndim not in (4, 5):
        raise UserError(f"{where}: pixel_values is {_shape(value)}; it must be [batch, channels, height, width]")
    if value.shape[-3] != wanted:
        raise UserError(
            f"{where}: pixel_values is {_shape(value)}, which has {value.shape[-3]} channels; {model.title} takes {wanted}"
        )


def _check_sound(config: Any, name: str, value: torch.Tensor, where: str) -> None:
    bins = getattr(config, "num_mel_bins", None)
    if name == "input_values" and not bins and not hasattr(config, "audio_channels") and value.ndim != 2:
        raise UserError(f"{where}: input_values is {_shape(value)}; it must be [batch, samples]")
    # Whisper and the audio spectrogram transformer take a whole spectrogram; other models stack or cut its frames first.
    whole = getattr(config, "max_source_positions" if name == "input_features" else "max_length", None)
    stacked = hasattr(config, "input_feat_per_channel")
    if isinstance(bins, int) and whole and not stacked and bins not in value.shape[1:]:
        raise UserError(f"{where}: {name} is {_shape(value)}; the model takes {bins} mel bins")


def _shape(tensor: torch.Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"
