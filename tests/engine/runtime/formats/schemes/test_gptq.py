"""GPTQ's layout: values, zero points of both versions of the format, and groups in any order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers.quantized.quantizers import gptq

from dtype_engine.core.errors import UserError
from dtype_engine.runtime.weights.coded import CodedSource


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_gptq_codes_of_every_width_and_zero_point_version_are_decoded(tmp_path: Path, bits: int, form: str) -> None:
    gptq(bits, form).check(tmp_path, f"gptq:int{bits}@g32")


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize(("size", "columns", "order"), [(64, 160, "none"), (48, 160, "none"), (32, 96, "shuffled")])
def test_gptq_codes_in_planes_are_decoded(tmp_path: Path, bits: int, size: int, columns: int, order: str) -> None:
    """Neither 64 nor 48 divides 160 columns, so that the last group is smaller."""
    gptq(bits, "gptq_p", size, columns, order).check(tmp_path, f"gptq:int{bits}@g{size}")


@pytest.mark.parametrize(("size", "order"), [(32, "regular"), (32, "shuffled"), (-1, "none"), (64, "none")])
def test_gptq_groups_of_any_order_and_size_are_decoded(tmp_path: Path, size: int, order: str) -> None:
    """-1 is a group for each row. The last of the groups of 64 is smaller."""
    made = gptq(size=size, order=order)
    made.check(tmp_path, made.format)


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round"])
def test_autoround_zero_points_are_decoded_with_and_without_offset(tmp_path: Path, packing: str) -> None:
    made = gptq(form="gptq" if packing == "auto_round:auto_gptq" else "gptq_v2")
    made.config["quantization_config"] |= {"quant_method": "intel/auto-round", "packing_format": packing}
    made.check(tmp_path, "auto-round:int4@g32")


def test_gptq_module_with_its_own_bits_and_group_size_is_decoded(tmp_path: Path) -> None:
    made = gptq(8)
    made.config["quantization_config"] |= {
        "bits": 4, "group_size": 128, "dynamic": {"+:m": {"bits": 8, "group_size": 32}},
    }  # fmt: skip
    made.check(tmp_path, "gptq:int8@g32")


@pytest.mark.parametrize("group", [3, -1])
def test_gptq_group_index_out_of_range_is_refused_by_name(tmp_path: Path, group: int) -> None:
    made = gptq(order="regular")
    made.tensors["m.g_idx"][5] = torch.tensor(group)
    with pytest.raises(UserError, match=r"m\.g_idx names groups"):
        CodedSource(made.open(tmp_path).coded["m.weight"]).read()
