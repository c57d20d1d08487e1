"""SDNQ: each type and packing of codes, zero points, products of two matrices and rotations, compared with numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.quantized.low_rank import sdnq

from dtype_engine.runtime.formats.schemes.unpack import unrotate
from dtype_engine.runtime.weights.coded import CodedSource


@pytest.mark.parametrize("shape", [(24, 80), (22, 100)])
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("sign", ["int", "uint"])
def test_integers_of_every_width_are_decoded(tmp_path: Path, sign: str, bits: int, shape: tuple[int, int]) -> None:
    """8 codes, which fill whole bytes, do not divide a row of 100."""
    made = sdnq(f"{sign}{bits}", shape=shape)
    made.check(tmp_path, made.format)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float6_e2m3fn", "float5_e1m3fn", "float4_e2m1fn", "float3_e1m1fn"])
@pytest.mark.parametrize("shape", [(24, 80), (22, 100)])
def test_small_floats_are_decoded(tmp_path: Path, kind: str, shape: tuple[int, int]) -> None:
    made = sdnq(kind, shape=shape)
    made.check(tmp_path, made.format)


@pytest.mark.parametrize("kind", ["int8", "uint8", "float8_e4m3fn"])
@pytest.mark.parametrize("rank", [0, 3])
def test_transposed_codes_and_matrices_are_decoded(tmp_path: Path, kind: str, rank: int) -> None:
    made = sdnq(kind, -1, rank, transposed=True)
    made.check(tmp_path, made.format)


@pytest.mark.parametrize(("rotation", "shape"), [(4, (24, 80)), (16, (22, 112)), (64, (24, 128))])
@pytest.mark.parametrize("rank", [0, 5])
def test_rotation_is_undone_after_the_product_is_added(
    tmp_path: Path, rotation: int, shape: tuple[int, int], rank: int
) -> None:
    made = sdnq("uint4", 16 if shape[1] % 16 == 0 else 20, rank, rotation=rotation, shape=shape)
    made.check(tmp_path, made.format)


@pytest.mark.parametrize("columns", [2, 4, 8, 16, 32, 64, 128, 256])
def test_rotating_twice_returns_the_values(columns: int) -> None:
    values = torch.randn(3, 2 * columns, dtype=torch.float64)
    torch.testing.assert_close(unrotate(unrotate(values.clone(), columns), columns), values)


@pytest.mark.parametrize(
    ("settings", "read"),
    [
        ({"weights_dtype": "int8", "modules_dtype_dict": {"uint4": ["m"]}}, True),
        ({"weights_dtype": "int8", "modules_dtype_dict": {"uint4": ["m.weight"]}}, True),
        ({"weights_dtype": "int8", "modules_dtype_dict": {"uint4": ["*.weig"]}}, True),
        ({"weights_dtype": "int8", "modules_dtype_dict": {"uint4": [".m"]}}, True),
        ({"weights_dtype": "uint2", "modules_dtype_dict": {"minimum_4bit": ["m"]}}, True),
        ({"weights_dtype": "int8", "modules_quant_config": {"m": {"weights_dtype": "uint4"}}}, True),
        ({"modules_dtype_dict": {"int8": ["other", ".weight", "x*"]}}, True),
        ({"modules_dtype_dict": {"minimum_3bit": ["m"]}}, True),
        ({"modules_dtype_dict": {"int8": ["m"]}}, False),
        ({"modules_dtype_dict": {"minimum_6bit": ["m"]}}, False),
        ({"weights_dtype": "uint16"}, False),
        ({"weights_dtype": "float4_e2m2fn"}, False),
        ({"weights_dtype": ["uint4"]}, False),
        ({"use_codebook": True}, False),
        ({"quant_method": "other"}, False),
        ({"modules_quant_config": {"m": {"use_codebook": True}}}, False),
    ],
)
def test_type_of_codes_is_the_one_that_the_settings_give_to_a_weight(
    tmp_path: Path, settings: dict[str, Any], read: bool
) -> None:
    made = sdnq()
    made.config["quantization_config"] |= settings
    found = made.open(tmp_path).coded
    assert bool(found) == read
    if read:
        np.testing.assert_array_equal(CodedSource(found["m.weight"]).read().numpy(), made.right["m.weight"])
