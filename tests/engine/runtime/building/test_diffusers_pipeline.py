"""Drift of whole diffusers pipelines equals that of plain diffusers with the same tensors cast by hand."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.pipelines import FAMILIES, make_pipeline, save_pipeline
from torch import nn

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.errors import UserError

pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> de.Session:
    monkeypatch.setattr("dtype_engine.runtime.inputs.pipeline_inputs._PICTURE", 32)
    monkeypatch.setattr("dtype_engine.runtime.inputs.pipeline_inputs._VIDEO", 32)
    monkeypatch.setattr("dtype_engine.runtime.inputs.pipeline_inputs._PIPELINE_STEPS", 2)
    return de.open(str(folder), options=de.Options(**options))


def in_diffusers(family: str, session: de.Session, dtypes: dict[str, torch.dtype]) -> torch.Tensor:
    """Return the pictures of plain diffusers with the tensors of the given components cast to the given dtypes."""
    pipeline = make_pipeline(family)
    for name, part in pipeline.components.items():
        if isinstance(part, nn.Module):
            for tensor in part.state_dict(keep_vars=True).values():
                if tensor.is_floating_point() and name in dtypes:
                    tensor.data = tensor.data.to(dtypes[name])
    pictures = []
    for batch in session.need_inputs().batches:
        call = dict(batch.kwargs)
        generator = torch.Generator().manual_seed(int(call.pop("seed")))
        pictures.append(torch.as_tensor(pipeline(**call, generator=generator, output_type="pt")[0]).double())
    return torch.cat(pictures)


@pytest.mark.parametrize("family", FAMILIES)
def test_drift_of_a_pipeline_equals_that_of_plain_diffusers(
    pipelines: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(save_pipeline(family, pipelines), monkeypatch)
    parts = {name for name in session.tree.modules if name and "." not in name}
    reference, candidate = (
        in_diffusers(family, session, dict.fromkeys(parts, dtype)) for dtype in (torch.float32, torch.bfloat16)
    )
    session.cast("*", "bfloat16")
    report = session.drift()
    assert report.output.elements == reference.numel()
    assert report.output.mean_abs == pytest.approx((candidate - reference).abs().mean().item(), abs=1e-6)
    assert report.output.max_abs == pytest.approx((candidate - reference).abs().max().item(), abs=1e-6)
    squares = (candidate.clamp(0, 1) - reference.clamp(0, 1)).square().mean().item()
    assert report.output.psnr_db == pytest.approx(-10 * math.log10(squares), abs=1e-4)
    assert report.output.ssim is not None
    assert -1 <= report.output.ssim < 1  # in some versions of torch, random numbers differ between the dtypes
    assert session.drift().output == report.output
    assert {module.name.partition(".")[0] for module in report.modules} >= parts - {"vae"}
    assert report.coverage is not None
    assert report.coverage.found == report.coverage.expected


def test_vae_that_the_pipeline_upcasts_is_noted_and_gets_its_dtypes_back(
    pipelines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(save_pipeline("sdxl", pipelines), monkeypatch)
    session.cast("vae", "float16")
    session.cast("vae.encoder", "bfloat16")
    held = {name: weight.tensor.dtype for name, weight in session.model.weights.items()}
    report = session.drift()
    assert {name: weight.tensor.dtype for name, weight in session.model.weights.items()} == held
    assert any("force_upcast" in notice for notice in report.notices)
    session.undo()
    reference, candidate = (in_diffusers("sdxl", session, {"vae": dtype}) for dtype in (torch.float32, torch.float16))
    assert session.drift().output.mean_abs == pytest.approx((candidate - reference).abs().mean().item(), abs=1e-6)


def test_float16_vae_that_makes_a_black_picture_is_located_and_remedied(
    pipelines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = make_pipeline("sd15")
    with torch.no_grad():
        pipeline.vae.decoder.up_blocks[0].resnets[1].conv2.weight *= 3e5
    pipeline.save_pretrained(pipelines / "black")
    session = opened(pipelines / "black", monkeypatch)
    session.cast("*", "float16")
    report = session.drift()
    assert report.output.nonfinite
    found = session.nonfinite(report)
    assert found is not None
    assert found.module == "vae.decoder.up_blocks.0.resnets.1.conv2"
    assert found.remedy
    before = session.plan.dtypes
    session.apply(de.Recipe.of([*session.recipe.rules, *map(de.Rule.parse, found.remedy)]))
    changed = {name for name, dtype in session.plan.dtypes.items() if dtype != before[name]}
    assert changed
    assert all(name.startswith("vae.decoder.") for name in changed), found.remedy
    assert session.drift().output.nonfinite == 0


def test_exported_pipeline_opens_as_a_pipeline(
    pipelines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(save_pipeline("sdxl", pipelines), monkeypatch)
    session.cast("{unet,text_encoder*}", "bfloat16")
    wanted = session.drift().output
    session.export(tmp_path / "out")
    again = opened(tmp_path / "out", monkeypatch)
    assert {weight.dtype for name, weight in again.model.weights.items() if name.startswith("unet.")} == {"bfloat16"}
    assert {weight.dtype for name, weight in again.model.weights.items() if name.startswith("vae.")} == {"float32"}
    stored = opened(tmp_path / "out", monkeypatch, reference="stored")
    assert stored.drift().output.max_abs == 0
    assert wanted.max_abs > 0


def test_pipeline_runs_on_prompts_and_refuses_other_inputs(
    pipelines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_pipeline("sd15", pipelines)
    session = opened(folder, monkeypatch, prompts=("a cat", "a dog"))
    assert session.need_inputs().description == "2 prompts, 2 steps, 32 x 32 pixels"
    assert [batch.kwargs["prompt"] for batch in session.need_inputs().batches] == ["a cat", "a dog"]
    with pytest.raises(UserError, match="makes pictures of prompts"):
        opened(folder, monkeypatch, audio=(Path("a.wav"),))
    index = json.loads((folder / "model_index.json").read_text())
    for number, (change, reason) in enumerate(
        (
            ({"_class_name": "NoSuchPipeline"}, "it has no NoSuchPipeline"),
            ({"scheduler": ["os", "system"]}, "is of the package os, whose code is not run"),
            ({"surplus": 3}, "diffusers can't make the pipeline"),
            ({"scheduler": ["diffusers"]}, "model_index.json gives scheduler no package and class"),
            ({"scheduler": ["diffusers", "NoSuchScheduler"]}, "scheduler: diffusers has no NoSuchScheduler"),
            ({"other": ["diffusers", "DDIMScheduler"]}, "there is no folder other, which model_index.json names"),
            ({"../0/scheduler": ["diffusers", "DDIMScheduler"]}, "is not the name of a file in this folder"),
        )
    ):
        copied = tmp_path / str(number)
        copied.mkdir()
        for entry in folder.iterdir():
            if entry.is_dir():
                shutil.copytree(entry, copied / entry.name)
        (copied / "model_index.json").write_text(json.dumps(index | change))
        with pytest.raises(UserError, match=reason):
            de.open(str(copied))


def test_pictures_of_reference_and_candidate_are_saved(
    pipelines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    session = opened(save_pipeline("dit", pipelines), monkeypatch)
    cast = dict.fromkeys(("transformer", "vae"), torch.bfloat16)
    reference, candidate = in_diffusers("dit", session, {}), in_diffusers("dit", session, cast)
    arguments = ["drift", str(pipelines / "dit"), "--cast", "*=bf16", "--save-pictures", str(tmp_path / "out")]
    assert run(cli, "dtype-engine", arguments) == 0
    for name, picture in (("reference", reference), ("candidate", candidate)):
        held = np.asarray(Image.open(tmp_path / "out" / f"1-{name}.png"))
        wanted = (255 * picture[0].clamp(0, 1)).round().movedim(0, -1).numpy()
        assert np.abs(held - wanted).max() <= 1
        pair = session.drift().pictures[0]
        small = np.frombuffer(getattr(pair, name).pixels, np.uint8).reshape(wanted.shape)
        assert np.abs(small - wanted).max() <= 1
        session.cast("*", "bfloat16")
    capsys.readouterr()
    assert run(cli, "dtype-engine", arguments) == 2
    assert "1-reference.png exists; replace it with --force" in capsys.readouterr().err
    assert run(cli, "dtype-engine", ["drift", "--sequences", "1", "--save-pictures", str(tmp_path / "none")]) == 2
    assert "makes no pictures" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["sdxl", "flux", "cogvideox"])
def test_pipeline_in_float16_equals_what_diffusers_runs(
    pipelines: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: in float16, torch rounds differently by the layout of inputs and by whether weights require gradients."""
    session = opened(save_pipeline(family, pipelines), monkeypatch)
    parts = {name for name in session.tree.modules if name and "." not in name}
    reference, candidate = (
        in_diffusers(family, session, dict.fromkeys(parts, dtype)) for dtype in (torch.float32, torch.float16)
    )
    session.cast("*", "float16")
    output = session.drift().output
    assert output.mean_abs == pytest.approx((candidate - reference).abs().mean().item(), rel=1e-12)
    assert output.max_abs == (candidate - reference).abs().max().item()


def test_pipeline_is_called_with_its_own_arguments(pipelines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("cogvideox", "sd3", "flux", "wan"):
        call = opened(save_pipeline(family, pipelines), monkeypatch).need_inputs().batches[0].kwargs
        assert call.keys() - {"num_frames"} == {"seed", "prompt", "num_inference_steps", "height", "width"}


def test_passes_show_no_future_warning(pipelines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SDXL's pipeline calls a function that diffusers has deprecated."""
    session = opened(save_pipeline("sdxl", pipelines), monkeypatch)
    session.cast("vae", "float16")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        session.drift()
    assert [str(each.message) for each in shown if issubclass(each.category, FutureWarning)] == []


def test_drift_of_pipelines_with_a_float8_component(pipelines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_pipeline("flux", pipelines / "float8")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    stored = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(file).items()}
    save_file(stored, file)
    session = opened(folder, monkeypatch)
    pictures = []
    for dtype in (torch.float32, torch.bfloat16):
        pipeline = make_pipeline("flux")
        pipeline.transformer.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
        for part in pipeline.components.values():
            if isinstance(part, nn.Module):
                part.to(dtype)
        call = dict(session.need_inputs().batches[0].kwargs)
        generator = torch.Generator().manual_seed(int(call.pop("seed")))
        pictures.append(pipeline(**call, generator=generator, output_type="pt")[0].double())
    assert session.drift().output.max_abs == 0
    session.cast("*", "bfloat16")
    assert session.drift().output.max_abs == (pictures[1] - pictures[0]).abs().max().item()
