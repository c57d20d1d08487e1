"""A scan scores a weight with the values that it gets when it is rounded to the inputs of its layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers import architectures
from tests.helpers.rank_correlation import compared
from torch import nn

import dtype_engine as de
from dtype_engine.core import dtypes
from dtype_engine.core.cancellation import CancelToken, never
from dtype_engine.reports.text_scan import scan_text
from dtype_engine.runtime.formats.dequantize import dequantize
from dtype_engine.runtime.model.weight import sharing
from dtype_engine.runtime.scan.local_errors import LocalErrors
from dtype_engine.runtime.scan.scanned_roundings import ScannedRoundings
from dtype_engine.runtime.session.saved_statistics import SavedStatistics

Q, UP, EMBEDDING = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.embed_tokens.weight",
)


def text(file: Path, seed: int = 1, length: int = 40) -> Path:
    """Write a file of random tokens."""
    ids = torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(seed))
    save_file({"input_ids": ids}, file)
    return file


@pytest.fixture
def opened(make_llama: Callable[..., Path], tmp_path: Path) -> Callable[..., de.Session]:
    """A function that opens a small Llama with calibration tokens apart from its inputs."""

    def opens(seed: int = 1, **options: Any) -> de.Session:
        folder = tmp_path / "llama"
        if not folder.exists():
            make_llama(tie_word_embeddings=False, initializer_range=0.2)
        calibration = text(tmp_path / f"calibration{seed}.safetensors", seed)
        ids = torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(0))
        given = de.Options(device="cpu", calibration=(calibration,), **options)
        return de.open(str(folder), options=given, inputs={"input_ids": ids})

    return opens


@pytest.mark.slow
def test_scores_agree_with_each_weight_rounded_alone(tmp_path: Path) -> None:
    """On the trained model of the program. In NVFP4, the scale of q, k and v is computed over all three."""
    calibration = tmp_path / "calibration.txt"
    calibration.write_text("The weights of a model are rounded one channel after the other. " * 20)
    session = de.open(options=de.Options(device="cpu", sequences=2, calibration=(calibration,)))
    kinds = ["int4@g32:gptq", "nvfp4:gptq"]
    scan, exact = session.scan(kinds, draws=96), session.scan(kinds, exact=True)
    for kind in kinds:
        rank, ratio, count = compared(scan, exact, kind)
        assert count >= 40
        assert rank >= 0.98, kind
        assert 0.8 <= ratio <= 1.25, kind


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "nvfp4:gptq"),
        ("gpt2", "int8:gptq"),
        ("mixtral", "float8_e4m3fn:gptq"),
        ("mixtral", "nvfp4:imatrix"),
        ("mixtral", "int4@g128:gptq"),
    ],
)
def test_rounded_values_are_those_of_a_cast_model(name: str, dtype: str) -> None:
    module, _ = architectures.make(name)
    session = de.open(module, inputs={"input_ids": architectures.tokens(30, 8)})
    model = session.model
    weights = [key for key, weight in model.weights.items() if weight.info.castable and len(weight.info.shape) > 1]
    rounded = ScannedRoundings(model, dict.fromkeys(weights, (dtype, "int8")))
    rounded.make(lambda done, total: None, never)
    planned = {key: weight.info.dtype for key, weight in model.weights.items()}
    shares = {
        key: [each.info.name for each in among] for key in weights if (among := sharing(model.weights, key, dtype))
    }
    model.apply(planned | dict.fromkeys(weights, dtype), shares=shares)
    blocks, count = dtypes.BY_NAME[dtype].blocks, 0
    for key in weights:
        assert (key, "int8") not in rounded
        if (key, dtype) not in rounded:
            continue
        weight, count = model.weights[key], count + 1
        gain = rounded.roundings[key, dtype].gain
        assert gain is not None
        assert gain > (0.5 if "imatrix" in dtype else 0.9999), key
        assert weight.scale is not None
        expected = dequantize(weight.tensor.data, weight.scale, torch.float32, blocks)
        found = rounded.values(key, dtype, None, torch.float32)
        assert torch.equal(found, expected), key
        for rows in (slice(0, 1), slice(1, 2), slice(1, len(expected))):
            assert torch.equal(rounded.values(key, dtype, rows, torch.float32), expected[rows]), (key, rows)
        if expected.ndim == 2:
            ids = torch.tensor([[3, 0], [1, 1]])
            assert torch.equal(rounded.look_up(key, dtype, ids, torch.float32), expected[ids])
    assert count >= 8
    assert {key for key, each in rounded.roundings.items() if each.gain is None} == {
        key for key in rounded.roundings if key not in rounded
    }


def test_gain_is_the_ratio_of_layer_errors_over_the_calibration_inputs(opened: Callable[..., de.Session]) -> None:
    session = opened()
    scan = session.scan(["int4@g32:gptq", "int4@g32:imatrix"], draws=1)
    seen: list[torch.Tensor] = []
    layer = session.model.module.get_submodule(UP.removesuffix(".weight"))
    hook = layer.register_forward_pre_hook(lambda module, given: seen.append(given[0].reshape(-1, 32).double()))
    for batch in session.calibration.inputs.batches:
        batch.run(session.model.module)
    hook.remove()
    inputs = torch.cat(seen)
    errors, squared = {}, {}
    for dtype in ("int4@g32", "int4@g32:gptq", "int4@g32:imatrix"):
        weight = session.model.weights[UP]
        stored = weight.stored.read().double()
        session.use_recipe(de.Recipe((de.Rule(UP, dtype),)))
        assert weight.scale is not None
        values = dequantize(weight.tensor.data, weight.scale, torch.float64, dtypes.BY_NAME[dtype].blocks)
        errors[dtype] = float((inputs @ (values - stored).T).square().sum())
        squared[dtype] = float((inputs.square() @ (values - stored).square().T).sum())
    gains = {score.dtype: score.rounding_gain for score in scan.weights if score.name == UP}
    assert gains["float32"] is None
    assert gains["int4@g32:gptq"] == pytest.approx(errors["int4@g32"] / errors["int4@g32:gptq"], rel=1e-3)
    assert gains["int4@g32:imatrix"] == pytest.approx(squared["int4@g32"] / squared["int4@g32:imatrix"], rel=1e-3)
    assert all(
        score.rounding_gain >= 1
        for score in scan.weights
        if score.dtype.endswith("gptq") and score.rounding_gain is not None
    )


def test_weights_that_no_product_uses_are_scored_with_the_nearest_values(opened: Callable[..., de.Session]) -> None:
    session = opened()
    scan = session.scan(["int4@g32", "int4@g32:gptq"], draws=4)
    scores = scan.scores()
    assert scores[EMBEDDING, "int4@g32:gptq"] == pytest.approx(scores[EMBEDDING, "int4@g32"], rel=1e-6)
    assert scores[UP, "int4@g32:gptq"] != pytest.approx(scores[UP, "int4@g32"], rel=1e-3)
    (notice,) = [each for each in scan.notices if "nearest values" in each]
    assert notice.startswith(f"1 weight, first {EMBEDDING}, scored with the nearest values")
    shown = scan_text(scan)
    assert "last, what the rounding does to the squared error of the layer's output" in shown
    assert any(line.endswith("x less error") for line in shown.splitlines())
    assert not [each for each in scan.notices if "fitted" in each]
    plain = session.scan(["int4@g32"], draws=4)
    assert plain.notices == ()
    assert "error" not in scan_text(plain)


class Experts(nn.Module):
    """Three experts in one weight, of which the last gets no token."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:20] @ self.experts[0].T + x[20:] @ self.experts[1].T + 0 * self.experts[2].sum()


def test_experts_without_tokens_are_named() -> None:
    torch.manual_seed(0)
    session = de.open(Experts(), inputs=torch.randn(40, 32))
    scan = session.scan(["int4@g32:gptq"], draws=2)
    (fitted, notice) = scan.notices
    assert fitted.startswith("the roundings were fitted to the same inputs on which the scan was made")
    assert notice == ("1 expert got too few calibration tokens, first in experts: scored with the nearest values")
    gain = scan.weights[1].rounding_gain
    assert gain is not None
    assert gain > 1


def test_saved_scan_keeps_gains_and_belongs_to_its_calibration_inputs(
    opened: Callable[..., de.Session], tmp_path: Path
) -> None:
    file, kinds = tmp_path / "scan.json", ["int4@g32:gptq"]
    first = opened().scan(kinds, draws=2, save=file)
    again = opened().scan(kinds, draws=2, save=file)
    assert again == first
    assert any(score.rounding_gain for score in again.weights)
    with pytest.raises(de.UserError, match="another calibration"):
        opened(2).scan(kinds, draws=2, save=file)
    plain = tmp_path / "plain.json"
    opened().scan(["int4@g32"], draws=2, save=plain)
    opened(2).scan(["int4@g32"], draws=2, save=plain)


def test_exact_scan_runs_the_calibration_inputs_once_for_many_weights(
    opened: Callable[..., de.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[set[str]] = []
    collect = SavedStatistics.collect

    def noted(self: SavedStatistics, rounded: Mapping[str, str], *rest: Any) -> Any:
        asked.append(set(rounded))
        return collect(self, rounded, *rest)

    monkeypatch.setattr(SavedStatistics, "collect", noted)
    kinds = ["int4@g32:gptq", "nvfp4:imatrix"]
    session = opened()
    together = session.scan(kinds, exact=True).scores()
    assert len(asked) == 2
    assert {EMBEDDING, Q, UP} <= asked[0] == asked[1]
    monkeypatch.setattr(type(session.model), "cache_budget", 1 << 11)
    asked.clear()
    assert opened().scan(kinds, exact=True).scores() == together
    assert max(map(len, asked)) < 5


def test_rounding_continues_after_it_was_cancelled(opened: Callable[..., de.Session]) -> None:
    kinds, token, steps = ["int4@g32:gptq"], CancelToken(), list[tuple[str, int, int | None]]()

    def progress(step: str, done: int, total: int | None) -> None:
        steps.append((step, done, total))
        if len(steps) == 3:
            token.cancel()

    session = opened()
    with pytest.raises(de.Cancelled):
        session.scan(kinds, draws=2, on_progress=progress, cancelled=token)
    assert [step[:2] for step in steps] == [("rounding", number) for number in range(1, 4)]
    found = session.scan(kinds, draws=2, on_progress=progress)
    assert steps[-1][0] == "scan"
    assert found.scores() == opened().scan(kinds, draws=2).scores()


def test_pieces_of_a_large_weight_have_its_rounded_values(
    opened: Callable[..., de.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = opened().scan(["int4@g32:gptq"], draws=2).scores()
    monkeypatch.setattr("dtype_engine.runtime.scan.local_errors.PIECE", 1 << 9)
    monkeypatch.setattr("dtype_engine.runtime.scan.local_errors._ROWS", 8)
    session, taken = opened(), set[int | None]()
    cast = LocalErrors.cast

    def noted(self: LocalErrors, name: str, dtype: str, rows: slice | None = None) -> torch.Tensor:
        taken.add(None if rows is None else rows.start)
        return cast(self, name, dtype, rows)

    monkeypatch.setattr(LocalErrors, "cast", noted)
    parts = session.scan(["int4@g32:gptq"], draws=2).scores()
    assert {8, 16} <= taken
    assert parts == pytest.approx(whole, rel=1e-4)
