"""Changes in a checkpoint's files, and GGUF files of given tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def change_config(folder: Path, **entries: Any) -> Path:
    """Set entries of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return folder


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """Let `change` add, replace and take out tensors of model.safetensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    return folder


def write_gguf(path: Path, tensors: Mapping[str, Any], **settings: int | float) -> Path:
    """Write a GGUF file of llama with these arrays, or (blocks, their kind) for quantized ones. settings: what `add_...` adds."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for name, value in settings.items():
        getattr(writer, f"add_{name}")(value)
    for name, held in tensors.items():
        values, kind = held if isinstance(held, tuple) else (held, None)
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
