from __future__ import annotations

import math
import re

import pytest
import torch
from tests.helpers import formats

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.roundings import ROUNDED_FORMATS, ROUNDINGS
from dtype_engine.runtime.numerics.quantize import cast_or_quantize


@pytest.mark.parametrize(
    "row",
    [row for row in dtypes.BY_NAME.values() if row.kind == "float" and row.blocks is None],
    ids=lambda row: row.name,
)
def test_dtype_ranges_equal_those_of_torch(row: dtypes.DType) -> None:
    dtype = getattr(torch, row.torch_name, None)
    if dtype is None or row.bits < 8:
        pytest.skip("this torch has no such dtype")
    info = torch.finfo(dtype)
    assert info.bits == row.bits
    assert info.max == row.max
    assert info.smallest_normal == row.tiny


def test_common_dtype_names_are_parsed() -> None:
    for text, name in {
        "bf16": "bfloat16", "torch.bfloat16": "bfloat16", "half": "float16", " FP16 ": "float16", "f32": "float32",
        "float": "float32", "double": "float64", "fp8": "float8_e4m3fn", "e5m2": "float8_e5m2", "i8": "int8",
        "stored": dtypes.STORED, "keep": dtypes.STORED, "fp8@tensor": "float8_e4m3fn@tensor", "fp8@t": "float8_e4m3fn@tensor",
        "int8@tensor": "int8@tensor", "e5m2@channel": "float8_e5m2", "mxfp4:FLOOR": "mxfp4:floor", "nvfp4": "nvfp4",
        "fp8@128x128:ue8m0": "fp8@128x128:ue8m0", "int4@g128a": "int4@g128a", "i4@32": "int4@g32",
        "int4@g32:gptq": "int4@g32:gptq", "fp8:gptq": "float8_e4m3fn:gptq", "E4M3:GPTQ": "float8_e4m3fn:gptq",
        "nvfp4:imatrix": "nvfp4:imatrix", "nvfp4:imat": "nvfp4:imatrix", "i8:imatrix": "int8:imatrix",
        "i4@32:imat": "int4@g32:imatrix",
    }.items():  # fmt: skip
        assert dtypes.parse_target(text) == name


@pytest.mark.parametrize(
    "text",
    ["bfloat17", "", "int64", "bool", "float8_e8m0fnu", "bf16@tensor", "fp8@rows", "fp8e5@row", "@tensor", "fp8@"],
)
def test_invalid_dtype_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(UserError) as caught:
        dtypes.parse_target(text)
    assert "\n" not in str(caught.value)


def test_nearest_dtype_name_is_suggested() -> None:
    with pytest.raises(UserError, match="did you mean bfloat16"):
        dtypes.parse_target("bfloat17")
    for text in ("int4", "int4@g64"):
        with pytest.raises(UserError, match="did you mean int4@g128 or int4@g32 or int4@g128a"):
            dtypes.parse_target(text)
    for text, names in (("bfloat", "bfloat16"), ("float8", "float8_e4m3fn or float8_e5m2")):
        with pytest.raises(UserError, match=rf"did you mean {names}\?$"):
            dtypes.parse_target(text)


@pytest.mark.parametrize("dtype", dtypes.COMPUTE_DTYPES + formats.WHOLE)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (0, 4)])
def test_bytes_of_a_shape_in_a_dtype_equal_those_of_torch_tensors(dtype: str, shape: tuple[int, ...]) -> None:
    data, scale = cast_or_quantize(torch.randn(shape), dtype)
    assert dtypes.nbytes_in(shape, dtype) == data.nbytes + (scale.nbytes if scale is not None else 0)


def test_short_names_of_dtypes_are_distinct() -> None:
    badges = [row.short_name for row in dtypes.BY_NAME.values()]
    assert len(set(badges)) == len(badges)
    assert all(math.isfinite(row.max) for row in dtypes.BY_NAME.values())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "bf16:gptq",
            "bfloat16 does not take the rounding :gptq, which is for float8_e4m3fn, int8, mxfp4, nvfp4, int4@g128, ",
        ),
        ("fp8@tensor:imatrix", "float8_e4m3fn@tensor does not take the rounding :imatrix, which is for "),
        ("stored:gptq", "stored does not take the rounding :gptq"),
        ("nvfp4:gptq:gptq", "nvfp4:gptq does not take the rounding :gptq"),
        ("int4:gptq", "unknown dtype 'int4': did you mean int4@g128 or int4@g32 or int4@g128a?"),
        ("int4@g32:gtpq", "unknown dtype 'int4@g32:gtpq': did you mean int4@g32:gptq?"),
        (":gptq", "unknown dtype ':gptq'"),
    ],
)
def test_refusal_of_a_rounding_names_the_formats_that_take_it(text: str, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        dtypes.parse_target(text)


def test_every_rounding_of_a_format_is_parsed_by_its_name_and_its_badge() -> None:
    rounded = [row for row in dtypes.BY_NAME.values() if row.rounding]
    assert {f"{name}:{rounding}" for name in ROUNDED_FORMATS for rounding in ROUNDINGS} <= {row.name for row in rounded}
    for row in rounded:
        assert dtypes.parse_target(row.name) == dtypes.parse_target(row.short_name) == row.name
        assert dtypes.rounded(dtypes.unrounded(row.name), row.rounding) == row.name
        assert len(row.short_name) <= 15
    for rounding in ROUNDINGS:
        assert set(dtypes.rounded_formats(rounding)) >= set(ROUNDED_FORMATS)
    assert dtypes.rounded("mxfp4", "floor") is None, "that is a rule for scales"


def test_roundings_are_completed_after_the_whole_format_only() -> None:
    assert dtypes.completions("int4") == ["int4@g128", "int4@g32", "int4@g128a"]
    assert dtypes.completions("int4@g32:") == ["int4@g32:imatrix", "int4@g32:gptq"]
    assert dtypes.completions("fp8:g") == ["fp8:gptq"]
    offered = {dtypes.parse_target(name) for name in dtypes.completions("")} - {dtypes.STORED}
    assert not any(dtypes.BY_NAME[name].rounding and dtypes.unrounded(name) in offered for name in offered)
    assert "iq2_xxs:imatrix" in offered, "it exists in no other way"
    for begun in ("", "fp8:", "mxfp4", "nvfp4:imatrix", "int8"):
        assert all(map(dtypes.parse_target, dtypes.completions(begun)))
