"""Calibration inputs: what the reference and the candidate are run on, one sequence at a time."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .errors import NoForward, UserError
from .model.live import LiveModel
from .options import Options
from .prompts import DEFAULT_PROMPTS
from .text import read_text

TOKENS_PER_SEQUENCE = 512
_RANDOM_SEQUENCES, _RANDOM_TOKENS = 4, 128


@dataclass(frozen=True, slots=True)
class Batch:
    """One call of the module. `next_tokens` ([batch, positions], int64, -100 where there is none) is what a language
    model should have predicted at each position."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    next_tokens: torch.Tensor | None = None
    text: str | None = None

    def on(self, device: torch.device, floats: torch.dtype | None = None) -> Batch:
        """The same on a device, its float tensors in `floats` where given."""
        return Batch(
            tuple(_moved(value, device, floats) for value in self.args),
            {key: _moved(value, device, floats) for key, value in self.kwargs.items()},
            self.next_tokens,
            self.text,
        )


@dataclass(frozen=True, slots=True)
class Inputs:
    """All batches, and what they are in a few words for the screen.

    made: they were made up here, not given as tensors. prompts: each is a prompt of the user's own.
    """

    batches: tuple[Batch, ...]
    description: str
    tokenizer: Any = None
    made: bool = True
    prompts: bool = False


def _moved(value: Any, device: torch.device, floats: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, floats) if floats is not None and value.is_floating_point() else value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device, floats) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, device, floats) for key, item in value.items()}
    return value


def from_values(values: Any, description: str) -> Inputs:
    """Inputs from what a user gave: a dict (keyword arguments), a tuple (positional ones), a tensor, or a list of
    these.
    """
    several = values if isinstance(values, list) else [values]
    batches = []
    for value in several:
        if isinstance(value, dict):
            batches.append(Batch(kwargs=dict(value)))
        elif isinstance(value, tuple):
            batches.append(Batch(args=value))
        elif isinstance(value, torch.Tensor):
            batches.append(Batch(args=(value,)))
        else:
            raise UserError(
                f"{description} gave a {type(value).__name__}: give a dict (keyword arguments) or a tuple (positional ones)"
            )
    return Inputs(tuple(batches), description, made=False)


def make_inputs(model: LiveModel, options: Options) -> Inputs:
    """The inputs for a model: what the user gave, else what suits it. Raises NoForward when nothing does."""
    if model.example_inputs is not None:
        try:
            values = model.example_inputs()
        except Exception as error:
            raise NoForward(f"example_inputs() of {model.title} failed: {type(error).__name__}: {error}") from error
        return from_values(values, "example_inputs()")
    config = getattr(model.module, "config", None)
    if config is None:
        raise NoForward(
            f"{model.title}: no forward pass, because nothing says what to run it on; write a function example_inputs() beside the "
            "model that returns a dict or a tuple of tensors"
        )
    main = getattr(model.module, "main_input_name", "input_ids")
    # CLIP and its kin name their token ids as the main input and can't run without a picture.
    contrastive = hasattr(config, "vision_config") and hasattr(config, "projection_dim")
    if main == "pixel_values" or (contrastive and "pixel_values" in _parameters(model.module)):
        return _picture_inputs(model, config)
    if main == "input_ids":
        return _text_inputs(model, config, options)
    raise NoForward(
        f"{model.title}: no inputs can be made for {main!r} yet; open it as file.py:Name with an example_inputs()"
    )


def _text_inputs(model: LiveModel, config: Any, options: Options) -> Inputs:
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = min(TOKENS_PER_SEQUENCE, int(getattr(text_config, "max_position_embeddings", 0) or TOKENS_PER_SEQUENCE))
    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        if options.prompts or options.texts:
            raise UserError(
                f"{model.title} has no tokenizer, so prompts and texts can't be used; leave them out for random token ids"
            )
        vocabulary = int(text_config.vocab_size)
        generator = torch.Generator().manual_seed(0)
        rows = [
            torch.randint(0, vocabulary, (min(_RANDOM_TOKENS, longest),), generator=generator)
            for _ in range(_RANDOM_SEQUENCES)
        ]
        described = f"random token ids ({len(rows)} x {len(rows[0])}): there is no tokenizer"
        return Inputs(tuple(_token_batch(model, row, None) for row in rows), described)
    texts = [*options.prompts, *(read_text(path) for path in options.texts)]
    given = "prompts and texts" if options.prompts and options.texts else "prompts" if options.prompts else "text"
    sequences: list[tuple[torch.Tensor, str]] = []
    for text in texts or DEFAULT_PROMPTS:
        ids = torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)
        if len(ids) == 0:
            raise UserError(f"the prompt {text!r} has no tokens")
        for start in range(0, len(ids), longest):
            part = ids[start : start + longest]
            if start == 0 or len(part) > 1:
                sequences.append((part, text))
    positions = sum(len(ids) for ids, _ in sequences)
    described = (
        f"{len(sequences)} {'default prompts' if not texts else f'sequences of your {given}'}, {positions} tokens"
    )
    batches = tuple(_token_batch(model, ids, text) for ids, text in sequences)
    return Inputs(batches, described, tokenizer, prompts=bool(options.prompts) and not options.texts)


def tokenizer_of(model: LiveModel) -> Any:
    """The tokenizer in the model's folder, or None where there is none or it can't be loaded."""
    folder = model.folder
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
    if folder is None or not any((folder / name).exists() for name in names):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AttributeError, TypeError):
        return None


def _token_batch(model: LiveModel, ids: torch.Tensor, text: str | None) -> Batch:
    """One sequence of token ids ([positions]) as a call of the model."""
    row = ids[None]
    kwargs: dict[str, Any] = {"input_ids": row, "attention_mask": torch.ones_like(row)}
    accepted = _parameters(model.module)
    config = model.module.config
    if "use_cache" in accepted and getattr(config, "use_cache", None) is not None:
        kwargs["use_cache"] = False
    if getattr(config, "is_encoder_decoder", False):
        kwargs["decoder_input_ids"] = row
    kwargs = {key: value for key, value in kwargs.items() if key in accepted or "kwargs" in accepted}
    return Batch(kwargs=kwargs, next_tokens=_next_tokens(model, row), text=text)


def _next_tokens(model: LiveModel, row: torch.Tensor) -> torch.Tensor | None:
    """What a causal language model should predict at each position, None for other models."""
    name = type(model.module).__name__
    if getattr(model.module.config, "is_encoder_decoder", False) or not name.endswith(("ForCausalLM", "LMHeadModel")):
        return None
    return torch.cat([row[:, 1:], torch.full_like(row[:, :1], -100)], dim=1)


def _picture_inputs(model: LiveModel, config: Any) -> Inputs:
    """A synthetic picture: smooth gradients with a little noise, normalised as image processors do."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    channels = int(getattr(vision, "num_channels", 3) or 3)
    generator = torch.Generator().manual_seed(0)
    y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    planes = torch.stack([torch.sin((3 + channel) * x) * torch.cos((2 + channel) * y) for channel in range(channels)])
    picture = planes + 0.1 * torch.randn(planes.shape, generator=generator)
    kwargs: dict[str, Any] = {"pixel_values": picture[None]}
    if "input_ids" in _parameters(model.module):
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        ids = torch.randint(0, int(text_config.vocab_size), (1, 8), generator=generator)
        kwargs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Inputs((Batch(kwargs=kwargs),), f"a synthetic picture, {width} x {height}")


def _parameters(module: nn.Module) -> Sequence[str]:
    return tuple(inspect.signature(module.forward).parameters)
