"""Quantized Gemma: every width, in linear layers and embeddings, also as transformers reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.quantized.quantizers import gemma

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.runtime.weights.coded import CodedSource


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("shape", [(24, 80), (22, 100)])
def test_linear_layers_are_decoded(tmp_path: Path, bits: int, shape: tuple[int, int]) -> None:
    made = gemma(bits, 1, shape)
    made.check(tmp_path, made.format)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 5])
def test_embeddings_are_decoded(tmp_path: Path, bits: int, groups: int) -> None:
    made = gemma(bits, groups, embedding=True)
    made.check(tmp_path, made.format)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_values_are_those_of_the_layers_of_transformers(tmp_path: Path, bits: int) -> None:
    quantized = pytest.importorskip("transformers.integrations.gemma_quant")
    torch.manual_seed(0)
    layers = {
        "a": quantized.QuantizedLinear(100, 22, num_bits=bits),
        "b": quantized.QuantizedEmbedding(22, 100, torch.float32, num_bits=bits),
    }
    held = {}
    for name, layer in layers.items():
        for end, tensor in layer.state_dict().items():
            random = torch.rand(tensor.shape) if tensor.is_floating_point() else torch.randint(-128, 128, tensor.shape)
            tensor.copy_(random.to(tensor.dtype))
            held[f"{name}.{end}"] = tensor
    save_file(held, tmp_path / "model.safetensors")
    declared = f'{{"quant_method": "gemma", "num_bits": {bits}, "quantize_embeddings": true}}'
    (tmp_path / "config.json").write_text(f'{{"quantization_config": {declared}}}')
    found = open_checkpoint(tmp_path).coded
    assert torch.equal(CodedSource(found["a.weight"]).read(), layers["a"]._dequantize_weights())
    assert torch.equal(CodedSource(found["b.weight"]).read(), layers["b"].weight)


@pytest.mark.parametrize(
    ("settings", "read"),
    [
        ({"module_quant_configs": {"other": {"num_bits": 2}}}, True),
        ({"module_quant_configs": {"m": {"num_bits": 4}, "^m": {"num_bits": 4}}}, True),
        ({"module_quant_configs": {"(": {"num_bits": 2}, "x": 4}}, True),
        ({"module_quant_configs": None}, True),
        ({"module_quant_configs": {"m": {"num_bits": 4}, "^m": {"num_bits": 2}}}, False),
        ({"module_quant_configs": {}, "num_bits": 3}, False),
        ({"module_quant_configs": {}, "num_bits": "4"}, False),
        ({"quant_method": "other"}, False),
    ],
)
def test_bits_are_those_that_the_settings_give_to_a_module(
    tmp_path: Path, settings: dict[str, Any], read: bool
) -> None:
    made = gemma()
    made.config["quantization_config"] |= settings
    assert bool(made.open(tmp_path).coded) == read
