"""llama.cpp's types beside the gguf package, which has its own code for them in numpy."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.helpers.gguf_files import gguf_file

import dtype_engine as de
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.core.errors import UserError
from dtype_engine.core.llama_types import LLAMA_DTYPES, llama_type
from dtype_engine.runtime.formats import llama_blocks
from dtype_engine.runtime.numerics.quantize import cast_or_quantize, values_in
from dtype_engine.runtime.numerics.roundings import InputStatistics, WeightStatistics, round_weight
from dtype_engine.runtime.weights.coded import CodedSource

BY_NUMPY = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "tq1_0", "tq2_0")


def matrix(rows: int = 12, width: int = 512) -> torch.Tensor:
    made = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 1, rows)[:, None]
    made[0] = 0.0
    return made


@pytest.mark.parametrize("dtype", BY_NUMPY)
def test_blocks_equal_those_of_the_gguf_package_bit_for_bit(dtype: str) -> None:
    values = matrix()
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    assert np.array_equal(llama_blocks.file_blocks(values, dtype), gguf.quants.quantize(values.numpy(), kind))


@pytest.mark.parametrize("dtype", LLAMA_DTYPES)
def test_values_equal_what_the_gguf_package_decodes(dtype: str) -> None:
    values, row = matrix(), llama_type(dtype)
    assert row is not None
    weights = torch.rand(512, generator=torch.Generator().manual_seed(2)) if dtype.endswith(":imatrix") else None
    found = llama_blocks.rounded(values, dtype, weights)
    blocks = llama_blocks.file_blocks(values, dtype, weights)
    decoded = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(row.kind))
    assert torch.equal(found, torch.from_numpy(decoded))
    assert blocks.nbytes == 12 * 512 // row.block * row.nbytes
    noise = (found - values)[1:].square().sum() / values[1:].square().sum()
    most = 0.7 if dtype.startswith("tq") else 4.0 ** (1.5 - row.bits)  # of tq, the values are -1, 0 and 1 times a scale
    assert noise < most, "far more error than a code of this many bits has"


@pytest.mark.parametrize("dtype", ["q4_k:imatrix", "q6_k:imatrix", "q3_k:imatrix", "q4_0:imatrix", "iq4_xs:imatrix"])
def test_imatrix_lowers_the_error_that_it_weights(dtype: str) -> None:
    values = matrix()[1:]
    squares = torch.logspace(-3, 3, 512)[torch.randperm(512, generator=torch.Generator().manual_seed(3))]
    given = WeightStatistics(1, {None: InputStatistics(squares, None, 7)})
    found, scales = round_weight(values, dtype, given)
    assert torch.equal(found, llama_blocks.rounded(values, dtype, squares * 7 / 7))
    assert torch.equal(scales.effective, torch.ones(1))
    kept, scale = cast_or_quantize(found, dtype, given=scales)
    assert torch.equal(kept, found)
    assert scale is not None
    unweighted = llama_blocks.rounded(values, dtype)

    def error(rounded: torch.Tensor) -> float:
        return float(((rounded - values).square() * squares).sum())

    assert error(found) < error(unweighted)


def test_expert_without_statistics_counts_all_channels_alike() -> None:
    experts = torch.stack([matrix()[1:], matrix()[1:]])
    squares = torch.logspace(-3, 3, 512)
    given = WeightStatistics(1, {1: InputStatistics(squares, None, 1)})
    found, _ = round_weight(experts, "q4_k:imatrix", given)
    assert torch.equal(found[0], llama_blocks.rounded(experts[0], "q4_k", torch.ones(512)))
    assert torch.equal(found[1], llama_blocks.rounded(experts[1], "q4_k", squares))


@pytest.mark.parametrize("dtype", ["q8_0", "q4_k", "iq4_xs", "iq2_xxs:imatrix"])
def test_values_that_are_not_finite_stay_and_spare_their_block(dtype: str) -> None:
    values = matrix()
    clean = values.clone()
    values[3, 7], values[4, 8] = torch.nan, -torch.inf
    clean[3, 7] = clean[4, 8] = 0.0
    found, wanted = llama_blocks.rounded(values, dtype), llama_blocks.rounded(clean, dtype)
    finite = torch.isfinite(values)
    assert torch.equal(found[finite], wanted[finite])
    assert torch.equal(torch.isnan(found), torch.isnan(values))
    assert found[4, 8] == -torch.inf


@pytest.mark.parametrize(("shape", "given"), [((64,), "float32"), ((4, 100), "float16"), ((2, 3, 0), "q8_0")])
def test_tensor_that_can_not_have_a_type_is_cast_to_what_replaces_it(shape: tuple[int, ...], given: str) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    found = values_in(values, "q8_0", torch.float32)
    assert torch.equal(found, values.to(getattr(torch, given)).float() if given != "q8_0" else values)


@pytest.mark.parametrize("kind", ["q6_k", "iq4_xs", "q5_1"])
def test_reader_of_gguf_files_finds_the_values_of_a_cast(kind: str, tmp_path: Path) -> None:
    values = matrix(8)
    path = tmp_path / "x.gguf"
    with gguf_file(path, "llama") as writer:
        of_type = gguf.GGMLQuantizationType[kind.upper()]
        writer.add_tensor("w", llama_blocks.file_blocks(values, kind), raw_dtype=of_type)
    read = CodedSource(open_checkpoint(path).coded["w"]).read()
    assert torch.equal(read, cast_or_quantize(values, kind)[0])


def test_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libgguf", None)
    llama_blocks._library.cache_clear()
    try:
        with pytest.raises(UserError, match=r"pip install 'dtype-tui\[llama\.cpp\]'"):
            llama_blocks.rounded(matrix(), "q4_k")
    finally:
        llama_blocks._library.cache_clear()
    assert de.Rule.parse("*=q4_k").dtype == "q4_k"
