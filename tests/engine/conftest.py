"""Small real checkpoints, made by transformers, and sessions on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.paths import TINYNET


@pytest.fixture
def make_llama(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a small Llama checkpoint and returns its folder.

    `dtypes` maps parts of tensor names to dtypes, for checkpoints that mix them.
    """

    def make(
        name: str = "llama", dtype: str = "float32", dtypes: dict[str, str] | None = None, **settings: Any
    ) -> Path:
        import torch
        import transformers
        from safetensors.torch import load_file, save_file

        torch.manual_seed(0)
        shard = settings.pop("max_shard_size", "1GB")
        config = transformers.LlamaConfig(
            **{
                "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True, **settings,
            }
        )  # fmt: skip
        folder = tmp_path / name
        model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
        model.save_pretrained(folder, max_shard_size=shard)
        if dtypes:
            file = folder / "model.safetensors"
            tensors = load_file(file)
            for part, wanted in dtypes.items():
                for key in tensors:
                    if part in key:
                        tensors[key] = tensors[key].to(getattr(torch, wanted))
            save_file(tensors, file, metadata={"format": "pt"})
        return folder

    return make


@pytest.fixture
def tinynet() -> Any:
    """Return a session on the network of the tutorials."""
    import dtype_engine as de

    return de.open(f"{TINYNET}:TinyNet")
