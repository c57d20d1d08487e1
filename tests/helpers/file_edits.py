"""Changes in a checkpoint's files, and GGUF files of given tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

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


def store_in_fp8(folder: Path, block: int = 128) -> Tensors:
    """Store the linear layers as DeepSeek does: codes in float8_e4m3fn, and a scale for each block of so many rows and columns.
    Returns the values of all weights in float32.
    """
    values: Tensors = {}

    def encode(tensors: Tensors) -> None:
        for name, tensor in list(tensors.items()):
            values[name] = tensor.float()
            if name.endswith("_proj.weight"):
                rows, columns = tensor.shape
                padded = functional.pad(tensor.float(), (0, -columns % block, 0, -rows % block))
                blocks = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block))
                scale = tensors[f"{name}_scale_inv"] = blocks.abs().amax((1, 3)) / 448
                codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
                decoded = codes.float() * scale[:, None, :, None]
                tensors[name], values[name] = (
                    each.flatten(2).flatten(0, 1)[:rows, :columns] for each in (codes, decoded)
                )

    declared = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    change_config(change_tensors(folder, encode), quantization_config=declared)
    return values


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
