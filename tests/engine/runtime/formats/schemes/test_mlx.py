"""MLX: every mode and width, settings of single modules, and experts, each of which is a weight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.helpers.quantized.quantizers import mlx_affine, mlx_experts, mlx_float

from dtype_engine.runtime.weights.coded import CodedSource


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_mlx_affine_mode_is_decoded(tmp_path: Path, bits: int) -> None:
    mlx_affine(bits).check(tmp_path, f"mlx:affine{bits}@g32")


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_metal_layers_of_transformers_are_decoded(tmp_path: Path, bits: int) -> None:
    mlx_affine(bits, metal=True).check(tmp_path, f"mlx:affine{bits}@g32")


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_mlx_float_modes_are_decoded(tmp_path: Path, mode: str) -> None:
    mlx_float(mode).check(tmp_path, f"mlx:{mode}")


def test_mlx_nvfp4_with_a_tensor_scale_is_decoded(tmp_path: Path) -> None:
    mlx_float("nvfp4", whole=1.7).check(tmp_path, "mlx:nvfp4")


def test_mlx_module_with_its_own_settings_is_decoded(tmp_path: Path) -> None:
    made = mlx_affine(6, name="model.embed_tokens")
    made.config["quantization"] = {
        "bits": 4, "group_size": 64, "mode": "mxfp4", "model.embed_tokens": {"bits": 6, "group_size": 32},
    }  # fmt: skip
    made.check(tmp_path, "mlx:affine6@g32")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("layers.0.mlp.switch_mlp.up_proj", "mlp.experts.{}.up_proj.weight"),
        ("layers.0.block_sparse_moe.switch_mlp.up_proj", "block_sparse_moe.experts.{}.w3.weight"),
    ],
)
def test_mlx_stacked_experts_are_decoded_as_separate_weights(tmp_path: Path, module: str, name: str) -> None:
    mlx_experts(module, name).check(tmp_path, "mlx:affine4@g32")


def test_mlx_stacks_of_unknown_names_are_decoded_as_one_weight(tmp_path: Path) -> None:
    made = mlx_affine(name="m.experts.up_proj", shape=(3, 24, 64))
    weight = made.open(tmp_path).coded["m.experts.up_proj.weight"]
    np.testing.assert_array_equal(CodedSource(weight).rows(1, 3).numpy(), made.right["m.experts.up_proj.weight"][1:])
