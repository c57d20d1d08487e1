"""HQQ: every packing, along either axis."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.quantized.quantizers import hqq


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_hqq_codes_of_every_width_along_both_axes_are_decoded(tmp_path: Path, bits: int, axis: int) -> None:
    hqq(bits, axis).check(tmp_path, f"hqq:int{bits}@g16")
