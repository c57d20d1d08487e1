"""float8 with block scales: every value equals the table of float8 values times the scale of its block, ragged blocks included."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.quantized.case import E4M3

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.runtime.weights.coded import CodedSource

_BLOCK = (128, 128)


@pytest.mark.parametrize(("rows", "columns"), [(256, 128), (576, 320), (5, 130)])
def test_fp8_block_values_equal_code_times_block_scale(tmp_path: Path, rows: int, columns: int) -> None:
    random = np.random.default_rng(rows)
    codes = random.integers(0, 256, (rows, columns), dtype=np.uint8)
    codes[(codes & 127) == 127] = 0  # those two codes are NaN
    scales = random.uniform(0.5, 2, (-(-rows // 128), -(-columns // 128))).astype(np.float32)
    save_file(
        {
            "x.weight": torch.from_numpy(codes).view(torch.float8_e4m3fn),
            "x.weight_scale_inv": torch.from_numpy(scales),
        },
        tmp_path / "model.safetensors",
    )
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(_BLOCK)}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    weight = checkpoint.coded["x.weight"]
    right = np.array(
        [[E4M3[codes[i, j]] * scales[i // 128, j // 128] for j in range(columns)] for i in range(rows)],
        np.float32,
    )
    assert weight.shape == (rows, columns)
    assert weight.format == "fp8:e4m3@128x128"
    np.testing.assert_array_equal(CodedSource(weight).read().numpy(), right)
    np.testing.assert_array_equal(CodedSource(weight).rows(3, 5).numpy(), right[3:5])


def test_stacked_experts_with_partial_blocks_are_decoded(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    codes = random.integers(0, 120, (3, 130, 140), dtype=np.uint8)
    scales = random.uniform(0.5, 2, (3, 2, 2)).astype(np.float32)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {name: torch.from_numpy(codes).view(torch.float8_e4m3fn), f"{name}_scale_inv": torch.from_numpy(scales)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(_BLOCK)}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weight = open_checkpoint(tmp_path).coded[name]
    right = E4M3[codes] * scales.repeat(128, 1).repeat(128, 2)[:, :130, :140]
    np.testing.assert_array_equal(CodedSource(weight).read().numpy(), right)
    np.testing.assert_array_equal(CodedSource(weight).rows(1, 2).numpy(), right[1:2])


def test_scales_that_do_not_cover_all_blocks_are_not_decoded(tmp_path: Path) -> None:
    save_file(
        {"x.weight": torch.zeros(576, 128).to(torch.float8_e4m3fn), "x.weight_scale_inv": torch.ones(4, 1)},
        tmp_path / "model.safetensors",
    )
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(_BLOCK)}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not open_checkpoint(tmp_path).coded
