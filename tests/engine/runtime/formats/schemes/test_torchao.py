"""torchao's safetensors: integers and float8 with any block, and scales in the order of tensor cores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers.quantized.quantizers import torchao_blocks, torchao_int4, torchao_swizzled


@pytest.mark.parametrize(
    ("codes", "block", "zero", "form"),
    [
        ("int4", (1, 32), True, "int4@g32"),
        ("int8", (1, 64), True, "int8@channel"),
        ("int8", (1, 64), False, "int8@channel"),
        ("int8", (32, 32), True, "int8@32x32"),
        ("e4m3", (1, 64), False, "e4m3@channel"),
        ("e4m3", (40, 64), False, "e4m3@tensor"),
        ("e4m3", (32, 32), False, "e4m3@32x32"),
    ],
)
def test_torchao_codes_with_block_scales_are_decoded(
    tmp_path: Path, codes: str, block: tuple[int, int], zero: bool, form: str
) -> None:
    torchao_blocks(codes, block, zero).check(tmp_path, f"torchao:{form}")


def test_torchao_codes_with_a_scalar_scale_are_decoded(tmp_path: Path) -> None:
    made = torchao_blocks("e4m3", (40, 64), zero=False)
    made.tensors["m._weight_scale"] = made.tensors["m._weight_scale"].reshape(torch.Size(()))
    made.check(tmp_path, "torchao:e4m3@tensor")


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("tiles", [True, False])
def test_torchao_scales_in_tensor_core_or_row_order_are_decoded(tmp_path: Path, kind: str, tiles: bool) -> None:
    torchao_swizzled(kind, tiles).check(tmp_path, f"torchao:{kind}")


@pytest.mark.parametrize(("size", "block"), [(16, "g16"), (64, "channel")])
def test_torchao_int4_with_additive_zero_points_is_decoded(tmp_path: Path, size: int, block: str) -> None:
    torchao_int4(size).check(tmp_path, f"torchao:int4@{block}")
