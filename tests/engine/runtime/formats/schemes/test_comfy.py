"""Weights for ComfyUI with two codes per byte have the values that numpy computes from codes, scales, offsets and rotation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.quantized.case import text
from tests.helpers.quantized.comfy import CASES, awq, w4a4, w4a8

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.check import check
from dtype_engine.runtime.weights.coded import CodedSource


@pytest.mark.parametrize("name", CASES)
def test_weights_of_two_codes_per_byte_are_decoded(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    case.check(tmp_path, case.format)


@pytest.mark.parametrize(("shape", "rotation"), [((23, 320), 64), ((37, 512), 256)])
def test_rotations_of_64_and_256_columns_are_undone(shape: tuple[int, int], rotation: int, tmp_path: Path) -> None:
    w4a4(shape, rotation).check(tmp_path, "comfy:rotated_int4@channel")
    w4a8(shape, rotation=rotation).check(tmp_path, "comfy:rotated_int4_codebook@g16")
    w4a8(shape, 6, False, rotation).check(tmp_path, "comfy:rotated_int6@g16")


@pytest.mark.parametrize(("shape", "group"), [((22, 96), 32), ((133, 640), 128)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_offsets_of_groups_are_added_after_the_scale(
    shape: tuple[int, int], group: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    awq(shape, group, dtype).check(tmp_path, f"comfy:uint4@g{group}")


@pytest.mark.parametrize("name", ["comfy int4 rotated", "comfy int4 by a codebook"])
def test_rotation_that_does_not_divide_the_columns_is_not_decoded(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    form = "convrot_w4a4" if "rotated" in name else "asym_w4a8_int8"
    case.tensors["x.comfy_quant"] = text(f'{{"format": "{form}"}}')  # 256 columns, where the weight has 80
    assert not case.open(tmp_path).coded


def test_correction_that_only_some_programs_apply_is_not_ignored(tmp_path: Path) -> None:
    case = w4a8()
    case.tensors["x.weight_correction"] = torch.zeros(5, 130)
    assert not case.open(tmp_path).coded


def test_description_in_the_metadata_is_enough(tmp_path: Path) -> None:
    case = w4a8()
    about = bytes(case.tensors.pop("x.comfy_quant").tolist()).decode()
    case.metadata["_quantization_metadata"] = f'{{"layers": {{"x": {about}}}}}'
    checkpoint = open_checkpoint(case.save(tmp_path))
    np.testing.assert_array_equal(CodedSource(checkpoint.coded["x.weight"]).read().numpy(), case.right["x.weight"])
    assert not check(checkpoint, "model").findings
