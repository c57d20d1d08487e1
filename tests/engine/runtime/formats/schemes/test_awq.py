"""AWQ's layouts: "gemm" with its order of codes in a word, and "gemv" with its unused groups."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.quantized.quantizers import awq


@pytest.mark.parametrize("layout", ["gemm", "gemv"])
@pytest.mark.parametrize("size", [32, 64])
def test_both_layouts_hold_the_same_values(tmp_path: Path, layout: str, size: int) -> None:
    awq(layout, size).check(tmp_path, f"awq:int4@g{size}")


def test_autoround_writes_the_gemm_layout_too(tmp_path: Path) -> None:
    made = awq()
    made.config["quantization_config"] |= {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}
    made.check(tmp_path, "auto-round:int4@g32")
