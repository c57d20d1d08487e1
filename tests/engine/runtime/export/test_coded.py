"""Exports of weights that other programs quantized: unchanged, or dequantized."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.helpers.exporting import export_checkpoint
from tests.helpers.quantized import quantizers
from tests.helpers.quantized.case import Case

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
