"""Rows of a weight that another program quantized, decoded without the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers.quantized import CASES

from dtype_engine.runtime.model.stored_values import EncodedValues


@pytest.mark.parametrize("name", CASES)
def test_single_rows_equal_those_of_the_whole_weight(name: str, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    for weight in CASES[name]().open(tmp_path / "model").encoded.values():
        for turned in (False, True):
            values = EncodedValues(weight, torch.bfloat16, turned=turned)
            whole = values.read()
            count = len(whole)
            for start, stop in ((0, count), (0, min(128, count)), (count // 2, count), (count - 1, count)):
                assert torch.equal(values.slice_of(slice(start, stop), cpu), whole[start:stop])
