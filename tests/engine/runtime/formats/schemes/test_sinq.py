"""SINQ: every packing, on shapes whose groups do not fill the last row of packed codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers.quantized.quantizers import sinq

from dtype_engine.checkpoint.check import check


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(("shape", "size"), [((32, 48), 16), ((96, 112), 112)])
def test_sinq_codes_of_every_width_are_decoded(tmp_path: Path, bits: int, shape: tuple[int, int], size: int) -> None:
    sinq(bits, shape, size).check(tmp_path, f"sinq:int{bits}@{'channel' if size == shape[1] else f'g{size}'}")


@pytest.mark.parametrize(("bits", "shape"), [(3, (23, 96)), (5, (29, 64)), (6, (33, 80))])
def test_packed_rows_that_are_not_full_are_decoded(tmp_path: Path, bits: int, shape: tuple[int, int]) -> None:
    sinq(bits, shape, 16, torch.bfloat16, plain=True).check(tmp_path, f"sinq:int{bits}@g16")


@pytest.mark.parametrize("plain", [False, True])
def test_check_names_a_weight_that_lacks_the_scales_of_its_columns(tmp_path: Path, plain: bool) -> None:
    case = sinq(plain=plain)
    assert not check(case.open(tmp_path), "model").findings
    del case.tensors["m.meta.scale2"]
    checkpoint = case.open(tmp_path)
    assert not checkpoint.coded
    assert [(found.kind, found.tensor) for found in check(checkpoint, "model").findings] == [("missing-part", "m.W_q")]


def test_weights_are_not_decoded_without_the_file_of_their_settings(tmp_path: Path) -> None:
    case = sinq()
    case.beside = {}
    assert not case.open(tmp_path).coded
