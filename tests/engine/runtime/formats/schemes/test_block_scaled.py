"""Weights with scales for their blocks: each value is the code times its scales, for all schemes, and so are some of the rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.quantized.block_scaled import CASES, ct_e5m3, modelopt_svd, modelslim

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.runtime.formats.schemes.unpack import scale_values, write_plain
from dtype_engine.runtime.weights.coded import CodedSource


@pytest.mark.parametrize("case", CASES)
def test_block_scaled_weights_are_decoded_as_code_times_scale(case: str, tmp_path: Path) -> None:
    made = CASES[case]()
    checkpoint = open_checkpoint(made.save(tmp_path))
    assert checkpoint.coded.keys() == made.right.keys()
    for name, right in made.right.items():
        weight = checkpoint.coded[name]
        assert weight.shape == right.shape
        values, rows = CodedSource(weight).read().numpy(), len(right)
        np.testing.assert_array_equal(values, right)
        for first, last in ((0, 1), (1, rows), (rows // 2, rows // 2 + 1), (rows, rows)):
            np.testing.assert_array_equal(CodedSource(weight).rows(first, last).numpy(), values[first:last])
    assert next(iter(checkpoint.coded.values())).format == made.format
    parts = [tensor.name for weight in checkpoint.coded.values() for tensor in weight.tensors]
    assert sorted(parts) == sorted(name for name in made.tensors)


@pytest.mark.parametrize(("rows", "columns"), [(24, 72), (23, 104)])
@pytest.mark.parametrize("column", [False, True])
def test_e5m3_scales_of_a_last_group_that_is_smaller_are_applied(
    tmp_path: Path, rows: int, columns: int, column: bool
) -> None:
    ct_e5m3(rows, column, columns).check(tmp_path, "ct:nvfp4_e5m3")


@pytest.mark.parametrize("kind", ["W8A8_DYNAMIC", "W8A8", "W4A4_DYNAMIC", "W8A8_MXFP8"])
@pytest.mark.parametrize(("shape", "half"), [((130, 160), True), ((43, 64), False)])
def test_types_of_msmodelslim_are_decoded(tmp_path: Path, kind: str, shape: tuple[int, int], half: bool) -> None:
    case = modelslim(kind, shape, half=half)
    case.check(tmp_path, case.format)


@pytest.mark.parametrize("metadata", [{"quarot": {"max_tp_size": 4}}, None])
def test_rotated_models_and_models_without_types_are_not_decoded(tmp_path: Path, metadata: object) -> None:
    case = modelslim("W8A8_DYNAMIC")
    case.beside["quant_model_description.json"]["metadata"] = metadata
    if metadata is None:
        case.beside = {}
    assert not case.open(tmp_path).coded


@pytest.mark.parametrize("rows", [22, 131])
def test_product_of_two_matrices_is_added_before_columns_are_multiplied(tmp_path: Path, rows: int) -> None:
    modelopt_svd(rows).check(tmp_path, "modelopt:nvfp4_svd")


def test_rows_decoded_in_chunks_equal_those_of_the_whole_weight(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("dtype_engine.runtime.formats.schemes.unpack.CHUNK", 400)
    for case in ("ct fp8 in blocks", "ct int4 with zero points", "modelopt int4", "comfy nvfp4", "quark int4"):
        (folder := tmp_path / case).mkdir()
        made = CASES[case]()
        weight = open_checkpoint(made.save(folder)).coded["x.weight"]
        np.testing.assert_array_equal(CodedSource(weight).rows(1, weight.shape[0]).numpy(), made.right["x.weight"][1:])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_every_8_bit_float_code_has_the_value_of_torch(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(dtype)
    out = torch.empty(16, 16)
    write_plain(codes, out)
    torch.testing.assert_close(out, codes.to(torch.float32), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(out)[~out.isnan()], torch.signbit(codes.to(torch.float32))[~out.isnan()])


def test_every_e8m0_scale_has_the_value_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    right = codes.view(torch.float8_e8m0fnu).to(torch.float32)
    torch.testing.assert_close(scale_values(codes), right, rtol=0, atol=0, equal_nan=True)


def test_decoding_in_threads_ignores_the_default_dtype(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dtype_engine.runtime.formats.schemes.unpack.CHUNK", 1)
    made = CASES["comfy nvfp4"]()
    weight = open_checkpoint(made.save(tmp_path)).coded["x.weight"]
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            values = CodedSource(weight).read()
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
    np.testing.assert_array_equal(values.numpy(), made.right["x.weight"])
