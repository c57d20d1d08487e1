"""Round-trip errors against whole-tensor expressions in float64, and exponents against math.frexp."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import formats
from tests.helpers.peak_memory import peak_anonymous

from dtype_engine.core import dtypes
from dtype_engine.core.errors import Cancelled
from dtype_engine.runtime.formats import row_blocks
from dtype_engine.runtime.formats.dequantize import dequantize, torch_dtype
from dtype_engine.runtime.numerics.overflow_underflow import count_losses
from dtype_engine.runtime.numerics.quantization_error import exponents, round_trip
from dtype_engine.runtime.numerics.quantize import cast_or_quantize, values_in

NAMES = dtypes.COMPUTE_DTYPES + formats.WHOLE
DTYPES = pytest.mark.parametrize("dtype", NAMES)
SHAPES = ((300, 700), (70_001,), (5, 6, 7), (), (0, 3), (3, 200_000))
STORED = (torch.float32, torch.bfloat16, torch.float16)


def of_every_size(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values from 1e-45 to 1e38, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.rand(shape, generator=generator).double() * 80 - 44
    values = (torch.randn(shape, generator=generator).sign() * 10**powers).float()
    return torch.where(torch.rand(shape, generator=generator) < 0.1, torch.zeros(()), values)


def there_and_back(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    kept, scale = cast_or_quantize(tensor, dtype)
    return kept.double() if scale is None else dequantize(kept, scale, torch.float32).double()


@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
def test_round_trip_figures_equal_those_in_float64(dtype: str, shape: tuple[int, ...]) -> None:
    """The stored dtypes take turns, so that each meets every shape and every dtype."""
    stored = STORED[(NAMES.index(dtype) + SHAPES.index(shape)) % len(STORED)]
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(0.02).to(stored)
    found = round_trip("w", tensor, dtype)
    before, after = tensor.double(), there_and_back(tensor, dtype)
    delta = after - before
    assert found.elements == tensor.numel()
    assert found.max_abs == pytest.approx(float(delta.abs().max()) if delta.numel() else 0.0, rel=1e-6, abs=1e-12)
    assert found.mean_abs == pytest.approx(float(delta.abs().mean()) if delta.numel() else 0.0, rel=1e-4, abs=1e-12)
    noise, energy = float(delta.square().sum()), float(before.square().sum())
    if noise:
        assert found.rel_l2 == pytest.approx(math.sqrt(noise / energy), rel=1e-4)
        assert found.sqnr_db == pytest.approx(10 * math.log10(energy / noise), rel=1e-4)
    else:
        assert (found.rel_l2, found.sqnr_db) == (0.0, math.inf)


@DTYPES
@pytest.mark.parametrize("special", [(), (math.inf, -math.inf, math.nan, 0.0, -0.0)])
def test_round_trip_counts_overflow_underflow_and_subnormal_values(dtype: str, special: tuple[float, ...]) -> None:
    tensor = of_every_size(40, 50)
    tensor.view(-1)[: len(special)] = torch.tensor(special)
    found = round_trip("w", tensor, dtype)
    kept, scale = cast_or_quantize(tensor, dtype)
    codes = kept.double()
    before, after = tensor.double(), there_and_back(tensor, dtype)
    finite = before.isfinite()
    assert found.nonfinite == int((~finite).sum())
    assert found.overflowed == int((finite & ~after.isfinite()).sum())
    assert found.saturated == int((before.isinf() & after.isfinite()).sum())
    assert found.underflowed == int((finite & (before != 0) & (codes == 0)).sum())
    subnormal = (codes != 0) & (codes.abs() < dtypes.BY_NAME[dtype].tiny)
    assert found.subnormal == (int(subnormal.sum()) if dtypes.BY_NAME[dtype].kind == "float" else 0)
    if found.overflowed:
        assert (found.max_abs, found.sqnr_db) == (math.inf, -math.inf)
    else:
        expected = (after - before)[finite].abs()
        assert found.max_abs == pytest.approx(float(expected.max()), rel=1e-6)
    del scale


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=40),
    st.sampled_from((*dtypes.COMPUTE_DTYPES, *dtypes.STORED_FORMATS)),
)
@settings(max_examples=300)
def test_round_trip_accepts_any_values_in_any_dtype(values: list[float], dtype: str) -> None:
    tensor = torch.tensor(values)
    found = round_trip("w", tensor, dtype)
    assert 0 <= found.underflowed + found.subnormal <= len(values)
    assert found.nonfinite == sum(not math.isfinite(value) for value in values)
    assert not math.isnan(found.max_abs)
    assert found.sqnr_db is None or not math.isnan(found.sqnr_db)
    if found.nonfinite and not found.overflowed:
        assert found.sqnr_db is None


def test_round_trip_in_the_stored_dtype_is_exact() -> None:
    for stored in dtypes.COMPUTE_DTYPES:
        found = round_trip("w", torch.randn(100).to(torch_dtype(stored)), stored)
        assert (found.max_abs, found.sqnr_db) == (0.0, math.inf)


def test_round_trip_error_does_not_depend_on_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = of_every_size(64, 33)
    for dtype in (*dtypes.COMPUTE_DTYPES, *dtypes.STORED_FORMATS):
        whole = round_trip("w", tensor, dtype)
        monkeypatch.setattr(row_blocks, "CHUNK", 50)
        parts = round_trip("w", tensor, dtype)
        monkeypatch.undo()
        assert parts.max_abs == whole.max_abs
        assert (parts.underflowed, parts.subnormal, parts.overflowed) == (
            whole.underflowed,
            whole.subnormal,
            whole.overflowed,
        )
        assert parts.mean_abs == pytest.approx(whole.mean_abs, rel=1e-6)


@given(st.lists(st.floats(width=32), max_size=60))
def test_histogram_of_exponents_equals_math_frexp(values: list[float]) -> None:
    found = exponents("w", torch.tensor(values, dtype=torch.float32))
    expected: dict[int, int] = {}
    for value in values:
        if math.isfinite(value) and value:
            power = math.frexp(value)[1] - 1
            expected[power] = expected.get(power, 0) + 1
    assert dict(found.counts) == expected
    assert found.zeros == values.count(0.0)
    assert found.nonfinite == sum(not math.isfinite(value) for value in values)


def test_round_trip_can_be_cancelled() -> None:
    with pytest.raises(Cancelled):
        round_trip("w", torch.ones(10), "float16", lambda: True)


def test_float8_codes_are_decoded_as_by_torch() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        codes = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16)
        from dtype_engine.runtime.formats.dequantize import dequantize_block

        assert torch.equal(
            dequantize_block(codes, torch.ones(1)).nan_to_num(1e9), codes.to(torch.float32).nan_to_num(1e9)
        )


def test_round_trip_uses_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"")
    with open(path, "r+b") as file:
        file.truncate(400_000_000)
    tensor = torch.from_file(str(path), shared=False, size=100_000_000, dtype=torch.float32).view(1000, 100_000)

    round_trip("w", tensor[:10], "float8_e4m3fn")

    def run() -> None:
        assert round_trip("w", tensor, "float8_e4m3fn").sqnr_db == math.inf

    assert peak_anonymous(run) < 64 * 2**20


def test_weights_command_calls_no_lossy_cast_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some tensors keep their large values, but lose a small one or contain NaN."""
    from safetensors.torch import save_file

    from dtype_engine.cli import cli, run

    tensors = {
        "gone": torch.tensor([1.0, 2.0, 1e-30]), "nan": torch.tensor([1.0, math.nan]), "exact": torch.tensor([1.0, 2.0]),
        "all": torch.tensor([1e-9]), "over": torch.tensor([1.0, 1e6, math.nan]), "steps": torch.tensor([3]),
        "codes": torch.zeros(2, dtype=torch.int8), "wave": torch.zeros(2, dtype=torch.complex64),
    }  # fmt: skip
    save_file(tensors, tmp_path / "x.safetensors")
    arguments = ["weights", str(tmp_path / "x.safetensors"), "--cast", "*=f16"]
    assert run(cli, "dtype-engine", [*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: (row["sqnr_db"], row["underflowed"], row["nonfinite"]) for row in found["weights"]}
    assert rows == {
        "gone": (None, 1, 0), "nan": (None, 0, 1), "exact": (None, 0, 0), "all": (0.0, 1, 0), "over": (None, 0, 1),
    }  # fmt: skip
    assert {row["name"]: row["why"] for row in found["skipped"]} == {
        name: f"is stored as {dtype}, which is never cast"
        for name, dtype in (("steps", "int64"), ("codes", "int8"), ("wave", "complex64"))
    }
    assert run(cli, "dtype-engine", arguments) == 0
    text = capsys.readouterr().out
    shown = {line.split()[0]: line.split()[2] for line in text.splitlines() if "f32→f16" in line}
    assert shown == {"exact": "exact", "all": "0.00", "over": "not", "gone": "-", "nan": "-"}
    assert text.splitlines()[-1].startswith("left out   3 tensors, first ")


EDGES = (3.4028234663852886e38, 3.39e38, 2.9e38, 1e-45, 1e39, 1e300, 1e-60)


@pytest.mark.parametrize("dtype", sorted(dtypes.STORED_FORMATS))
@pytest.mark.parametrize("edge", EDGES)
def test_quantized_values_near_the_limits_of_a_dtype_stay_finite(edge: float, dtype: str) -> None:
    """The extreme value makes no other value NaN, and both ways of counting report the values beyond the range."""
    wide = torch.float64 if edge > EDGES[0] or edge < 1e-45 else torch.float32
    noise = torch.randn(130, 256, generator=torch.Generator().manual_seed(0)).to(wide)
    one, both, whole = noise.clone(), noise.clone(), (noise / noise.abs().max()).double().mul(edge).to(wide)
    one[0, 0] = both[0, 0] = edge
    both[0, 1], both[5] = -edge, 0
    for weight in (one, -one, both, whole):
        _, scale = cast_or_quantize(weight, dtype)
        assert scale is not None
        assert bool(torch.isfinite(scale).all())
        assert float(scale.min()) > 0
        assert bool(torch.isfinite(values_in(weight, dtype, torch.float32)).all())
        found, loss = round_trip("w", weight, dtype), count_losses("w", weight, dtype)
        assert found.overflowed == 0
        row = dtypes.BY_NAME[dtype]
        powers = row.blocks is not None and row.blocks.scale in ("uint8", "float8_e8m0fnu")
        most = row.max * 2.0 ** (128 - math.frexp(row.max)[1]) if powers else float(torch.finfo(torch.float32).max)
        beyond = int((weight.to(torch.float32).abs().double() > most).sum())
        assert found.saturated == beyond
        assert (loss.saturated if loss is not None else 0) == beyond
        if weight is one and row.blocks is not None and not row.blocks.tensor_scale:
            assert float((values_in(weight, dtype, torch.float32)[129] - weight[129]).abs().max()) < 0.5
