"""AWQ's layouts: "gemm" with its order of codes in a word, "gemv" with its unused groups, and "gemv_fast" with both."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.quantized.quantizers import awq


@pytest.mark.parametrize("layout", ["gemm", "gemv", "gemv_fast"])
@pytest.mark.parametrize("size", [32, 64])
def test_each_awq_layout_is_decoded(tmp_path: Path, layout: str, size: int) -> None:
    awq(layout, size).check(tmp_path, f"awq:int4@g{size}")


def test_autoround_weights_in_awq_gemm_layout_are_decoded(tmp_path: Path) -> None:
    made = awq()
    made.config["quantization_config"] |= {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}
    made.check(tmp_path, "auto-round:int4@g32")


def test_llm_awq_tensor_name_scaled_zeros_is_accepted(tmp_path: Path) -> None:
    made = awq("gemv_fast")
    made.tensors["m.scaled_zeros"] = made.tensors.pop("m.qzeros")
    made.check(tmp_path, "awq:int4@g32")
