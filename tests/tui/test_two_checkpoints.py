"""The app on a checkpoint whose reference is another one, with a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.helpers import checkpoint_folders
from tests.helpers.recorded_worker import make_engine
from tests.helpers.screen_text import lines, screen, until

from dtype_engine import Options
from dtype_engine.checkpoint.source import locate
from dtype_tui.app import DtypeApp
from dtype_tui.screens.overlay import Overlay
from dtype_tui.state.launch import Launch

pytestmark = pytest.mark.slow


async def test_app_shows_drift_from_another_checkpoint(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    checkpoint_folders.save("llama", a)
    transformers.AutoModelForCausalLM.from_pretrained(a).bfloat16().save_pretrained(b)
    checkpoint_folders.tokenizer().save_pretrained(b)
    options = Options(reference=str(a), prompts=("a b c d",))
    launch = Launch("b", locate(str(b)).peek()[0])
    app = DtypeApp(launch, lambda emit, _: make_engine("thread", str(b), options, emit, read_headers=False))
    name = "model.layers.0.mlp.up_proj.weight"
    right = load_file(a / "model.safetensors")[name].double()
    noise = right - load_file(b / "model.safetensors")[name].double()
    sqnr = 10 * torch.log10(right.square().sum() / noise.square().sum()).item()
    async with app.run_test(size=(140, 40)) as pilot:
        await until(pilot, lambda: app.controller.experiment.results.weights)
        results = app.controller.experiment.results
        assert results.report is not None
        assert results.report.reference == app.controller.experiment.model.reference == str(a)
        assert results.weights[name].sqnr_db == pytest.approx(sqnr, rel=1e-6)
        await pilot.press("slash", *"layers.0.mlp.up_proj.weight", "enter")
        await pilot.pause()
        row = next(line for line in lines(app) if " weight " in line and "→" in line)
        assert "f32→bf16" in row.replace(" ", "")
        assert f"{sqnr:.1f}" in row, row
        await pilot.press("v")
        await until(pilot, lambda: isinstance(app.screen, Overlay))
        assert f"from {a}: SQNR {sqnr:.2f} dB" in screen(app)
        await pilot.press("escape", "less_than_sign", "enter")
        await pilot.pause()
        assert f"reference {a}" in " ".join(screen(app).split())
