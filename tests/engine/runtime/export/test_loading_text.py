"""What is said of how an export loads."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch

from dtype_engine.checkpoint.source import locate
from dtype_engine.recipe import Recipe
from dtype_engine.runtime.export.plan import of_checkpoint
from dtype_engine.runtime.export.readme import loading_text


def test_notes_do_not_call_quantized_weights_float32(tmp_path: Path) -> None:
    quantization = {"quant_method": "gptq", "bits": 4}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0.mlp.up_proj"
    tensors = {
        f"{layer}.qweight": torch.zeros(4, 48, dtype=torch.int32),
        f"{layer}.qzeros": torch.zeros(1, 6, dtype=torch.int32),
        f"{layer}.scales": torch.ones(1, 48, dtype=torch.float16),
        "model.embed_tokens.weight": torch.zeros(64, 32),
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = locate(str(tmp_path)).open()
    assert checkpoint is not None
    text = loading_text(of_checkpoint(checkpoint, "x", Recipe()))
    assert "already" in text
    assert "gptq" in text.lower()
    assert "brings all of it" not in text
