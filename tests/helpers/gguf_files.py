"""GGUF files, written by the gguf package, and those of models as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Change = Callable[[gguf.GGUFWriter], object]


@contextmanager
def gguf_file(path: Path, architecture: str, **options: Any) -> Iterator[gguf.GGUFWriter]:
    """A writer, whose file is written when the block ends."""
    writer = gguf.GGUFWriter(path, architecture, **options)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(path: Path, architecture: str, model: Any, *changes: Change, kind: str = "F32", parts: int = 0) -> None:
    """Write a model with the names in the gguf package's table. changes: functions that add further entries. kind: the type of the
    matrices. parts: the number of tensors in each part of a split file; 0 does not split.
    """
    config = model.config
    family = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(family, config.num_hidden_layers)
    with gguf_file(path, architecture, split_max_tensors=parts) as writer:
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            values, (stem, _, local) = tensor.float().numpy(), name.rpartition(".")
            if local == "gate_up_proj":  # experts of one layer: the file has gate and up apart
                for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                    _add(writer, f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight", half, kind)
                continue
            if name.endswith("experts.down_proj"):
                _add(writer, f"blk.{name.split('.')[2]}.ffn_down_exps.weight", values, kind)
                continue
            if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):  # the two halves of each head alternate
                heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
                shape = (heads, 2, len(values) // heads // 2, *values.shape[1:])
                values = values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
            if architecture.startswith("gemma") and "norm" in stem:
                values = values + 1
            _add(writer, f"{names.get_name(stem)}.{local}", values, kind)
        for change in changes:
            change(writer)


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any], kind: str) -> None:
    values = np.ascontiguousarray(values, np.float32)
    if values.ndim < 2 or "ffn_gate_inp" in name:
        writer.add_tensor(name, values)
    else:
        of_type = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(values, of_type), raw_dtype=of_type)
