"""bitsandbytes: 4 bits in blocks of successive values, with factors that may be quantized themselves, and 8 bits in rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers.quantized.quantizers import bnb_4bit, bnb_8bit


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_4_bit_codes_are_decoded(tmp_path: Path, kind: str, nested: bool) -> None:
    bnb_4bit(kind=kind, nested=nested).check(tmp_path, f"bnb:{kind}@64")


@pytest.mark.parametrize("shape", [(24, 40), (23, 37), (24, 6, 32)])
def test_bitsandbytes_blocks_that_begin_inside_a_row_are_decoded(tmp_path: Path, shape: tuple[int, ...]) -> None:
    bnb_4bit(shape, nested=True).check(tmp_path, "bnb:nf4@64")


def test_bitsandbytes_codes_stored_as_bfloat16_are_decoded(tmp_path: Path) -> None:
    made = bnb_4bit()
    made.tensors["m.weight"] = made.tensors["m.weight"].view(-1, 2).view(torch.bfloat16)
    made.check(tmp_path, "bnb:nf4@64")


def test_bitsandbytes_8_bit_codes_are_decoded(tmp_path: Path) -> None:
    bnb_8bit().check(tmp_path, "bnb:int8@channel")
