"""Values in float8 without scales, and files of which float8 values are codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.cli import cli
from dtype_engine.cli.program import run

FLOAT8 = torch.tensor([[0.5, -3.0, 448.0], [2.0**-9, 0.0, 1.0]]).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("others", "metadata", "plain"),
    [
        ({}, {}, True),
        ({"norm.scale": FLOAT8[0].clone(), "y.scale_shift_table": FLOAT8.clone()}, {}, True),
        ({"y.weight": torch.ones(3), "y.weight_scale": torch.ones(())}, {}, True),
        ({"x.scale": torch.ones(2, 1)}, {}, False),
        ({"y.weight": FLOAT8.clone(), "y.weight_scale": torch.ones(2)}, {}, False),
        ({"x.comfy_quant": torch.ones(2, dtype=torch.uint8)}, {}, False),
        ({}, {"_quantization_metadata": "{}"}, False),
    ],
)  # fmt: skip
def test_float8_is_plain_where_no_scale_belongs_to_it(
    tmp_path: Path, others: dict[str, torch.Tensor], metadata: dict[str, str], plain: bool
) -> None:
    save_file({"x.weight": FLOAT8, "x.bias": torch.ones(2), **others}, tmp_path / "a.safetensors", metadata)
    coded = open_checkpoint(tmp_path / "a.safetensors").coded
    assert ("x.weight" in coded and coded["x.weight"].format == "float8:e4m3") == plain


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_float8_value_is_widened_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    """All 256 codes, also NaN and infinities, in a matrix, a vector and a number."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    tensors = {"a": codes.clone().view(4, 8, 8), "b": codes.clone(), "c": codes[70].clone(), "d": codes[:0].clone()}
    save_file(tensors, tmp_path / "a.safetensors")
    assert (
        run(
            cli,
            "dtype-engine",
            ["export", str(tmp_path / "a.safetensors"), "--cast", "*=f32", "-o", str(tmp_path / "o")],
        )
        == 0
    )
    written = load_file(tmp_path / "o" / "model.safetensors")
    for name, tensor in tensors.items():
        torch.testing.assert_close(written[name], tensor.float(), rtol=0, atol=0, equal_nan=True)
