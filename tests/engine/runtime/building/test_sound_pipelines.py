"""Pipelines of diffusers that make sounds: measured and saved as waves, and never as pictures."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.pipelines import make_pipeline, save_pipeline
from torch import nn

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.errors import UserError

diffusers = pytest.importorskip("diffusers")
soundfile = pytest.importorskip("soundfile")
SOUNDS = {"stable_audio": 4, "audioldm": 16_000}
"""The values per second of the sounds that a pipeline makes."""
pytestmark = pytest.mark.skipif(not hasattr(diffusers, "AudioLDMPipeline"), reason="this diffusers has no AudioLDM")


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


def in_diffusers(family: str, call: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """The sound of diffusers itself, with all tensors in this dtype."""
    pipeline = make_pipeline(family)
    for part in pipeline.components.values():
        for tensor in part.state_dict(keep_vars=True).values() if isinstance(part, nn.Module) else ():
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    given = {name: value for name, value in call.items() if name != "seed"}
    sound = pipeline(**given, generator=torch.Generator().manual_seed(int(call["seed"])), output_type="pt")[0]
    return torch.as_tensor(sound).float()


@pytest.mark.parametrize("family", SOUNDS)
def test_sound_is_measured_and_saved_as_a_wave(pipelines: Path, tmp_path: Path, family: str) -> None:
    folder = save_pipeline(family, pipelines)
    session = de.open(str(folder))
    call = session.need_inputs().batches[0].kwargs
    reference, candidate = (in_diffusers(family, call, dtype) for dtype in (torch.float32, torch.bfloat16))
    session.cast("*", "bfloat16")
    report = session.drift()
    assert report.output.max_abs == (candidate.double() - reference.double()).abs().max().item()
    assert (report.output.psnr_db, report.output.ssim, report.pictures) == (None, None, ())
    out = tmp_path / "out"
    assert run(cli, "dtype-engine", ["drift", str(folder), "--cast", "*=bf16", "--save-pictures", str(out)]) == 0
    assert sorted(file.name for file in out.iterdir()) == ["1-candidate.wav", "1-reference.wav"]
    for name, sound in (("reference", reference), ("candidate", candidate)):
        held, rate = soundfile.read(out / f"1-{name}.wav", dtype="float32", always_2d=True)
        assert rate == SOUNDS[family]
        assert np.array_equal(held.T, sound.reshape(-1, sound.shape[-1]).numpy())
    with pytest.raises(UserError, match="makes sounds of prompts"):
        de.open(str(folder), options=de.Options(images=(Path("a.png"),)))


@pytest.mark.parametrize("family", SOUNDS)
def test_decoders_of_sounds_make_no_pictures(pipelines: Path, tmp_path: Path, family: str) -> None:
    """Stable Audio's decoder makes waves. That of AudioLDM makes spectrograms, which no file of sound can hold."""
    session = de.open(str(save_pipeline(family, pipelines) / "vae"))
    described = {"audioldm": "2 calls of random latents of a sound", "stable_audio": "1 call that stable_audio makes"}
    assert session.need_inputs().description.startswith(described[family])
    session.cast("*", "bfloat16")
    report = session.drift()
    assert 0 < report.output.rel_l2 < 0.1
    assert (report.output.psnr_db, report.pictures) == (None, ())
    arguments = ["drift", str(pipelines / family / "vae"), "--save-pictures", str(tmp_path / "out")]
    assert run(cli, "dtype-engine", arguments) == (0 if family == "stable_audio" else 2)


def in_plain(module: nn.Module, calls: list[dict[str, Any]], dtype: torch.dtype) -> torch.Tensor:
    module = copy.deepcopy(module).to(dtype)
    outputs = []
    for call in calls:
        given = {
            name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in call.items()
        }
        with torch.no_grad():
            output = module(**given)
        outputs.append((output if isinstance(output, torch.Tensor) else output.sample).double().flatten())
    return torch.cat(outputs)


@pytest.mark.parametrize("component", ["unet", "vocoder"])
def test_component_whose_own_inputs_fail_runs_on_those_of_its_pipeline(pipelines: Path, component: str) -> None:
    """The UNet refuses embeddings of texts of one width, and the vocoder is of transformers, where nothing makes spectrograms."""
    folder = save_pipeline("audioldm", pipelines) / component
    session = de.open(str(folder), options=de.Options(settings=de.RunSettings(float_inputs="model")))
    calls = [dict(batch.kwargs) for batch in session.need_inputs().batches]
    assert " that audioldm makes for 1 default prompt, 2 steps" in session.need_inputs().description
    part = getattr(make_pipeline("audioldm"), component)
    reference, candidate = (in_plain(part, calls, dtype) for dtype in (torch.float32, torch.bfloat16))
    session.cast("*", "bfloat16")
    output = session.drift().output
    assert output.elements == len(reference)
    assert output.max_abs == (candidate - reference).abs().max().item()


def test_component_that_its_own_inputs_suit_keeps_them(pipelines: Path) -> None:
    for family, component in (("stable_audio", "text_encoder"), ("sd15", "unet"), ("sd15", "text_encoder")):
        described = de.open(str(save_pipeline(family, pipelines) / component)).need_inputs().description
        assert " makes for " not in described, (family, component)
