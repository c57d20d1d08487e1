"""float8 with block scales: every value equals the table of float8 values times the scale of its block, ragged blocks included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.quantized.block_scaled import fp8_blocks
from tests.helpers.quantized.case import E4M3, Case

from dtype_engine.runtime.weights.coded import CodedSource

_CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


@pytest.mark.parametrize("shape", [(256, 128), (576, 320), (25, 130)])
def test_fp8_block_values_equal_code_times_block_scale(tmp_path: Path, shape: tuple[int, int]) -> None:
    fp8_blocks(shape).check(tmp_path, "fp8:e4m3@128x128")


def test_stacked_fp8_experts_with_partial_blocks_are_decoded(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    codes = random.integers(0, 120, (3, 130, 140), dtype=np.uint8)
    scales = random.uniform(0.5, 2, (3, 2, 2)).astype(np.float32)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {name: torch.from_numpy(codes).view(torch.float8_e4m3fn), f"{name}_scale_inv": torch.from_numpy(scales)}
    weight = Case(tensors, {}, config=_CONFIG).open(tmp_path).coded[name]
    right = E4M3[codes] * scales.repeat(128, 1).repeat(128, 2)[:, :130, :140]
    np.testing.assert_array_equal(CodedSource(weight).read().numpy(), right)
    np.testing.assert_array_equal(CodedSource(weight).rows(1, 2).numpy(), right[1:2])


def test_fp8_weight_with_too_few_block_scales_is_not_decoded(tmp_path: Path) -> None:
    tensors = {"x.weight": torch.zeros(576, 128).to(torch.float8_e4m3fn), "x.weight_scale_inv": torch.ones(4, 1)}
    assert not Case(tensors, {}, config=_CONFIG).open(tmp_path).coded
