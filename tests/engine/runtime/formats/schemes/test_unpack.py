"""Decoding piece by piece, in several threads: the pieces make up the whole, and may be written in inference mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.quantized.case import Case
from tests.helpers.quantized.quantizers import awq, bnb_4bit, gptq, hqq, mlx_affine, quanto, torchao_swizzled

from dtype_engine.runtime.formats.schemes import unpack
from dtype_engine.runtime.weights.coded import CodedSource

MADE: list[tuple[Callable[[], Case], str]] = [
    (lambda: gptq(3, order="shuffled"), "gptq:int3@g32"),
    (awq, "awq:int4@g32"),
    (lambda: bnb_4bit((70, 40), nested=True), "bnb:nf4@64"),
    (lambda: hqq(3, axis=0), "hqq:int3@g16"),
    (lambda: mlx_affine(5), "mlx:affine5@g32"),
    (lambda: torchao_swizzled("nvfp4"), "torchao:nvfp4"),
]


@pytest.mark.parametrize(("made", "form"), MADE)
def test_weight_decoded_in_chunks_equals_the_whole_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[], Case], form: str
) -> None:
    monkeypatch.setattr(unpack, "CHUNK", 1)  # the smallest pieces, of 32 rows
    made().check(tmp_path, form)


def test_decoding_in_threads_works_in_inference_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack, "CHUNK", 1)
    made = quanto(shape=(320, 8))
    weight = made.open(tmp_path).coded["m.weight"]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            found = CodedSource(weight).read()
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(found.numpy(), made.right["m.weight"])


def test_decoded_values_are_float32_for_any_default_dtype(tmp_path: Path) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        for place, (made, form) in enumerate(MADE):
            made().check(tmp_path / str(place), form)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
def test_rows_of_a_single_packed_word_are_unpacked(bits: int) -> None:
    words = torch.tensor([[-2, 77, 1 << 30]], dtype=torch.int32)
    count = 32 // bits
    out = torch.empty(3, count)
    unpack.unpack(words.t(), bits, out)
    right = [
        [(word & 0xFFFFFFFF) >> bits * place & (1 << bits) - 1 for place in range(count)] for word in words[0].tolist()
    ]
    assert out.tolist() == right
