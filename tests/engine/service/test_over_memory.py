"""The worker on a model that is larger than the memory: every further pass reads all weights from the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from tests.helpers.recorded_worker import RecordedEngine

from dtype_engine import Options, Recipe, Rule
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import Cancelled
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.service import events
from dtype_engine.service.commands import Cancel, Measure, SetRecipe
from dtype_engine.service.jobs import FLOOR

BF16 = Recipe((Rule.parse("*=bf16"),))


@pytest.mark.parametrize("floor", ["auto", "always"])
def test_noise_floor_of_a_model_run_from_disk_is_measured_only_on_request(
    make_llama: Callable[..., Path], floor: Literal["auto", "always"]
) -> None:
    folder = make_llama(vocab_size=512, hidden_size=256, intermediate_size=512)
    options = Options(over_memory=True, max_memory={"cpu": 1 << 21}, sequences=2, floor=floor)
    with RecordedEngine("thread", str(folder), options) as recorded:
        recorded.wait_for(events.Idle)
        recorded.worker.request(SetRecipe(BF16))
        report = recorded.measured(BF16).report
        recorded.wait_for(events.Idle, since=recorded.events.index(recorded.measured(BF16)))
        assert bool(recorded.answers(FLOOR)) == (floor == "always")
    read, lost = report.memory.read_bytes, recorded.of(events.CastDone)[-1].lost
    assert read is not None
    assert read > 0
    assert lost == report.lost


def test_drift_is_kept_if_counting_lost_values_is_cancelled(
    make_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over memory the count reads all weights once more, which takes as long as a pass."""
    counting, original = threading.Event(), LiveModel.lost_values

    def stopped(model: LiveModel, planned: Any, cancelled: IsCancelled, *rest: Any) -> Any:
        if any(weight.dtype == "bfloat16" for weight in model.weights.values()):
            counting.set()
            while not cancelled():
                time.sleep(0.005)
            raise Cancelled
        return original(model, planned, cancelled, *rest)

    folder = make_llama(vocab_size=512, hidden_size=256, intermediate_size=512)
    options = Options(over_memory=True, max_memory={"cpu": 1 << 21}, sequences=2, floor="never")
    with RecordedEngine("thread", str(folder), options) as recorded:
        recorded.wait_for(events.Idle)
        begun = len(recorded.events)
        with monkeypatch.context() as patched:
            patched.setattr(LiveModel, "lost_values", stopped)
            recorded.worker.request(SetRecipe(BF16))
            assert counting.wait(60)
            recorded.worker.request(Cancel())
            report = recorded.measured(BF16, begun).report
            recorded.wait_for(events.Idle, since=begun)
        assert recorded.of(events.CastDone, begun) == [
            events.CastDone(BF16, None, "those that the casts lose are not counted, because the count was stopped")
        ]
        begun = len(recorded.events)
        recorded.worker.request(Measure())
        whole = recorded.measured(BF16, begun).report
    assert report.lost is None
    assert whole.lost is not None
    assert (report.output, report.modules, report.sequences) == (whole.output, whole.modules, whole.sequences)


def broken(folder: Path, code: str) -> tuple[str]:
    (folder / "metrics.py").write_text(f"import os\ndef broken(outputs, inputs):\n    {code}\n")
    return (f"{folder}/metrics.py:broken",)


@pytest.mark.parametrize("over_memory", [False, True])
def test_drift_is_kept_if_a_user_metric_fails(
    make_llama: Callable[..., Path], tmp_path: Path, over_memory: bool
) -> None:
    folder = make_llama(vocab_size=512, hidden_size=256, intermediate_size=512)
    limits = {"over_memory": True, "max_memory": {"cpu": 1 << 21}} if over_memory else {}
    metrics = broken(tmp_path, "raise ValueError('no labels')")
    options = Options(metrics=metrics, sequences=2, floor="never", **limits)  # type: ignore[arg-type]
    with RecordedEngine("thread", str(folder), options) as recorded:
        recorded.wait_for(events.Idle)
        begun = len(recorded.events)
        recorded.worker.request(SetRecipe(BF16))
        report = recorded.measured(BF16, begun).report
        refused = recorded.wait_for(events.Refused, since=begun)
        recorded.wait_for(events.Idle, since=begun)
        assert not recorded.of(events.Failed, begun)
        assert [each.lost for each in recorded.of(events.CastDone, begun)] == [()]
    assert "no labels" in refused.message
    assert report.output.sqnr_db > 0
    assert report.lost == ()


def test_drift_is_discarded_if_files_change_while_it_is_measured(
    make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_llama()
    metrics = broken(tmp_path, f"os.utime('{folder}/model.safetensors', (1, 1))\n    return 1.0")
    with RecordedEngine("thread", str(folder), Options(metrics=metrics, sequences=2, floor="never")) as recorded:
        failed = recorded.wait_for(events.Failed)
        assert not recorded.of(events.Measured)
    assert "after it was opened" in failed.message


def test_lost_values_are_counted_if_no_forward_pass_can_run(tmp_path: Path) -> None:
    """No inputs can be made for the model, so no measurement counts them."""
    torch.manual_seed(0)
    config = transformers.PatchTSTConfig(
        num_input_channels=2, context_length=32, patch_length=8, patch_stride=8, d_model=256, ffn_dim=512,
        num_hidden_layers=1, num_attention_heads=2,
    )  # fmt: skip
    model = transformers.PatchTSTForPrediction(config)
    with torch.no_grad():
        name, weight = next((name, each) for name, each in model.named_parameters() if each.shape == (512, 256))
        weight[:4] = 1e6
    model.save_pretrained(tmp_path / "model")
    options = Options(over_memory=True, max_memory={"cpu": 1 << 21}, sequences=1, floor="never")
    with RecordedEngine("thread", str(tmp_path / "model"), options) as recorded:
        assert recorded.wait_for(events.ModelReady).no_forward
        recorded.wait_for(events.Idle)
        begun = len(recorded.events)
        recorded.worker.request(SetRecipe(Recipe((Rule.parse("*=f16"),))))
        recorded.wait_for(events.Idle, since=begun)
        (lost,) = recorded.of(events.CastDone)[-1].lost or ()
    assert (lost.tensor, lost.overflowed) == (name, 1024)
