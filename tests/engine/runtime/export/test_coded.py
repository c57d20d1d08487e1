"""Exports of weights that other programs quantized: unchanged, or dequantized."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.helpers.exporting import export_checkpoint
from tests.helpers.quantized import quantizers
from tests.helpers.quantized.case import Case
from transformers import AutoModelForCausalLM

from dtype_engine import Recipe, Rule
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.source import locate
from dtype_engine.runtime.session.verify import verify

MADE: dict[str, Callable[[], Case]] = {
    "GPTQ": quantizers.gptq,
    "AWQ": quantizers.awq,
    "bitsandbytes": lambda: quantizers.bnb_4bit(nested=True),
    "HQQ": quantizers.hqq,
    "SINQ": quantizers.sinq,
    "MLX": quantizers.mlx_affine,
    "MLX, stacked experts": quantizers.mlx_experts,
    "torchao": quantizers.torchao_swizzled,
    "quanto": quantizers.quanto,
}


@pytest.mark.parametrize("form", MADE)
def test_export_without_rules_copies_weights_of_other_quantizers_unchanged(form: str, tmp_path: Path) -> None:
    made = MADE[form]()
    source = made.open(tmp_path / "source")
    export_checkpoint(source, "source", Recipe(()), out := tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (source.path, out))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (tensor, after[name]))), name
    kept = made.config.get("quantization_config")
    assert json.loads((out / "config.json").read_text()).get("quantization_config") == kept
    with safe_open(out / "model.safetensors", "pt") as file:
        assert made.metadata.items() <= file.metadata().items()
    again = open_checkpoint(out).coded
    assert {name: weight.format for name, weight in again.items()} == {
        name: weight.format for name, weight in source.coded.items()
    }
    assert verify(out, locate(str(source.path))).same


@pytest.mark.parametrize("form", MADE)
def test_export_to_float32_writes_the_decoded_values(form: str, tmp_path: Path) -> None:
    made = MADE[form]()
    source = made.open(tmp_path / "source")
    export_checkpoint(source, "source", Recipe((Rule.parse("*=f32"),)), out := tmp_path / "out")
    after = load_file(out / "model.safetensors")
    assert source.coded.keys() == made.right.keys()
    for name, value in made.right.items():
        np.testing.assert_allclose(after[name].numpy(), value, rtol=1e-6, atol=1e-7)
    assert not {"quantization_config", "quantization"} & json.loads((out / "config.json").read_text()).keys()
    assert verify(out, locate(str(source.path))).same


def test_from_pretrained_raises_for_copied_codes_that_config_json_does_not_declare(
    make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_llama()
    tensors, types = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if "proj" in name]:
        scale = tensors[name].float().abs().amax(1, keepdim=True) / 127
        more = {"": (tensors[name].float() / scale).round().to(torch.int8), "_scale": scale, "_offset": scale * 0}
        tensors |= {name + end: tensor for end, tensor in more.items()}
        types |= dict.fromkeys((name + end for end in more), "W8A8_DYNAMIC")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "quant_model_description.json").write_text(json.dumps(types))
    export_checkpoint(open_checkpoint(source), "source", Recipe(()), out := tmp_path / "out")
    with pytest.raises(OSError, match="not-for-transformers"):
        AutoModelForCausalLM.from_pretrained(out)
    assert "would take the codes of its weights for values" in (out / "README.md").read_text()
    assert len(open_checkpoint(out).coded) == len(types) // 3
