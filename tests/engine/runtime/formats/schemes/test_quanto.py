"""optimum-quanto with 8 bits, of linear layers and of convolutions."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.quantized.quantizers import quanto


@pytest.mark.parametrize("codes", ["int8", "e4m3"])
@pytest.mark.parametrize("shape", [(24, 40), (24, 3, 2, 2)])
def test_a_scale_for_each_channel(tmp_path: Path, codes: str, shape: tuple[int, ...]) -> None:
    quanto(codes, shape).check(tmp_path, f"quanto:{codes}@channel")
