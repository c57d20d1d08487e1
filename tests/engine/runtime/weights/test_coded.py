"""Rows of a weight that another program quantized, decoded without the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers.quantized import CASES

from dtype_engine.runtime.weights.coded import CodedSource


@pytest.mark.parametrize("name", CASES)
def test_decoded_rows_equal_those_of_the_whole_weight(name: str, tmp_path: Path) -> None:
    for weight in CASES[name]().open(tmp_path / "model").coded.values():
        for turned in (False, True):
            values = CodedSource(weight, torch.bfloat16, turned=turned)
            whole = values.read()
            count = len(whole)
            for start, stop in ((0, count), (0, min(128, count)), (count // 2, count), (count - 1, count)):
                assert torch.equal(values.rows(start, stop), whole[start:stop])
