"""Loads the preprocessing in a model's folder: a tokenizer, an image processor, a feature extractor, or a processor."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtype_engine.checkpoint.weight_files import refuse_links_out
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.foreign_code import failures_as, foreign_code
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.runtime.building.architecture import reason
from dtype_engine.runtime.inputs.default_prompts import DEFAULT_PROMPTS
from dtype_engine.runtime.inputs.limited import PartFails, try_tokenizer
from dtype_engine.runtime.inputs.processor_limits import FILES as _PROCESSORS
from dtype_engine.runtime.libraries.hub import offline
from dtype_engine.runtime.libraries.silence_libraries import without_panic_message
from dtype_engine.runtime.model.live import LiveModel

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
_MOST_OFFSET = 8


@contextmanager
def running(what: str) -> Iterator[None]:
    """Context manager for a block that runs the preprocessing of a model's folder. Any exception, and any panic of a library
    written in Rust, becomes a `PartFails` whose message begins with `what`. Warnings are hidden.
    """
    with failures_as(PartFails, what), without_panic_message(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def tokenizer_of(model: LiveModel) -> Any:
    """Return the tokenizer in the model's folder or else in its GGUF file, or None if it is missing or can't be loaded."""
    return _loaded(model, _TOKENIZERS, _load_tokenizer)


def needed_tokenizer(model: LiveModel) -> Any:
    """Return the tokenizer for the user's texts. Raises UserError if there is none."""
    if (tokenizer := tokenizer_of(model)) is None:
        raise UserError(f"{model.title} {no_tokenizer(model)}, so prompts and texts can't be used; leave them out")
    return tokenizer


def _load_tokenizer(folder: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    with suppress(NoForward):  # it exceeds a limit, which is said when the user's limits are known
        # All prompts are tried, because the same texts are not tried again when they become inputs.
        try_tokenizer(folder.name, tokenizer, DEFAULT_PROMPTS, InputLimits())
        tokenizer.decode(tokenizer(DEFAULT_PROMPTS[0])["input_ids"])  # many faults of a tokenizer.json show only in use
    return tokenizer


def processor_of(model: LiveModel) -> Any:
    """Return the processor for text and pictures in the model's folder, or None if the folder has none or it can't be loaded."""
    processor = loaded_by(model, "AutoProcessor")
    together = hasattr(processor, "image_processor") and hasattr(processor, "tokenizer")
    return processor if together else None


def loaded_by(model: LiveModel, kind: str) -> Any:
    """Return what a class of transformers, such as `AutoImageProcessor`, loads from the model's folder, or None if it can't."""
    import transformers

    return _loaded(model, _PROCESSORS, getattr(transformers, kind).from_pretrained)


def no_tokenizer(model: LiveModel) -> str:
    """Return why the model's folder has no usable tokenizer, in words that continue "the folder", such as "has no tokenizer"."""
    try:
        tokenizer = _loaded_or_fails(model, _TOKENIZERS, _load_tokenizer)
    except Exception as error:
        if "trust_remote_code" in str(error):
            return (
                "has a tokenizer that needs its own Python code, which is not run unless you pass --trust-remote-code"
            )
        return f"has a tokenizer that is damaged or can't be loaded ({error if isinstance(error, UserError) else reason(error)})"
    return "has no tokenizer" if tokenizer is None else "has a tokenizer"


def _loaded(model: LiveModel, files: tuple[str, ...], load: Callable[..., Any]) -> Any:
    try:
        return _loaded_or_fails(model, files, load)
    except Exception:  # transformers and tokenizers raise all kinds for damaged files and missing packages
        return None


def _loaded_or_fails(model: LiveModel, files: tuple[str, ...], load: Callable[..., Any]) -> Any:
    """Return `load(folder, ...)` for the model's folder, or None if the folder has none of these files. If a GGUF model's folder
    has no tokenizer files, the tokenizer inside the GGUF file is loaded. Raises any exception that `load` raises, ValueError if
    one of the files is not a regular file, and UserError if a file in the folder is a link out of it.
    """
    folder, inside = model.folder, {}
    if folder is None:
        return None
    merged = model.checkpoint.merged if model.checkpoint is not None else None
    if merged is not None and any((merged.adapter.path / name).exists() for name in files):
        folder = merged.adapter.path
    if not any((folder / name).exists() for name in files):
        if model.checkpoint is None or model.checkpoint.form != "gguf" or files is not _TOKENIZERS:
            return None
        inside = {"gguf_file": model.checkpoint.path.name}
    for name in files:
        if (folder / name).exists() and not (folder / name).is_file():
            raise ValueError(f"{name} is not a regular file")  # opening a pipe would block
    refuse_links_out(folder)
    with offline(), foreign_code(), without_panic_message(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load(folder, local_files_only=True, trust_remote_code=model.trust_remote_code, **inside)


def parameters(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


def text_config(config: Any) -> Any:
    """Return the part of a model's configuration that describes its language model, or all of it if it has no such part."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def accepted(model: LiveModel, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return those outputs of a processor (`kwargs`) that the forward pass accepts as arguments. A list of tensors is stacked."""
    names = parameters(model.module)
    taken = {key: value for key, value in kwargs.items() if key in names}
    return {
        key: torch.stack(value) if isinstance(value, list) and all(map(torch.is_tensor, value)) else value
        for key, value in taken.items()
    }


def random_ids(model: LiveModel, rows: int, length: int) -> torch.Tensor:
    """Return token ids drawn uniformly from the vocabulary: int64 [rows, length], the same in every run."""
    generator = torch.Generator().manual_seed(0)
    count = int(getattr(text_config(model.module.config), "vocab_size", None) or 2)
    return torch.randint(0, count, (rows, length), generator=generator)


def learned_positions(module: nn.Module) -> int | None:
    """Return the number of positions in the text's learned position embedding, or None if the model has none. RoBERTa and similar
    models number positions from the padding token's id + 1; the rows before this number are not counted.
    """
    config = text_config(module.config)
    named = getattr(config, "max_position_embeddings", None) or getattr(config, "max_target_positions", None)
    if not isinstance(named, int):
        return None
    sizes = [
        child.num_embeddings - (child.padding_idx + 1 if child.padding_idx is not None else 0)
        for name, child in module.named_modules()
        if isinstance(child, nn.Embedding)
        and ("position" in name or name.endswith("wpe"))
        and named <= child.num_embeddings <= named + _MOST_OFFSET
    ]
    return min(sizes) if sizes else None
