"""Drift of diffusers models equals that of plain diffusers with the same tensors cast by hand."""

from __future__ import annotations

import copy
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.pipelines import COMPONENTS, FAMILIES, save_pipeline

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.recipe import make_plan, presets

pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


def in_diffusers(folder: Path, calls: list[dict[str, Any]], dtype: torch.dtype) -> torch.Tensor:
    """Return the output of diffusers with all tensors of the file and all inputs in this dtype."""
    import diffusers

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: moved(each) for name, each in value.items()}
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    name = json.loads((folder / "config.json").read_text())["_class_name"]
    module = getattr(diffusers, name).from_config(json.loads((folder / "config.json").read_text()))
    module.load_state_dict(load_file(folder / "diffusion_pytorch_model.safetensors"))
    module.eval()
    for tensor in module.state_dict(keep_vars=True).values():
        tensor.data = tensor.data.to(dtype)
    with torch.no_grad():
        outputs = [module.decode(**moved(call)) if "z" in call else module(**moved(call)) for call in calls]
    return torch.cat([output.sample.double().flatten() for output in outputs])


@pytest.mark.parametrize(("family", "component"), COMPONENTS)
def test_drift_of_a_component_equals_that_of_plain_diffusers(pipelines: Path, family: str, component: str) -> None:
    folder = save_pipeline(family, pipelines) / component
    session = de.open(str(folder), options=de.Options(settings=de.RunSettings(float_inputs="model")))
    session.cast("*", "bfloat16")
    report = session.drift()
    calls = [batch.kwargs for batch in session.need_inputs().batches]
    reference, candidate = (in_diffusers(folder, calls, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert report.output.elements == len(reference)
    assert report.output.mean_abs == pytest.approx((candidate - reference).abs().mean().item(), abs=1e-6)
    assert report.output.rel_l2 == pytest.approx(((candidate - reference).norm() / reference.norm()).item(), abs=1e-6)
    assert report.output.kl_mean is None
    assert report.coverage is not None
    assert not report.coverage.missing
    assert len(report.modules) > 30


def test_mixed_dtypes_of_a_diffusers_model_are_kept_and_exported(pipelines: Path, tmp_path: Path) -> None:
    import diffusers

    unet = diffusers.UNet2DConditionModel.from_pretrained(save_pipeline("sdxl", pipelines) / "unet")
    unet.to(torch.bfloat16)
    unet.conv_in.float()
    unet.save_pretrained(tmp_path / "unet")
    session = de.open(str(tmp_path / "unet"))
    dtypes = {name: weight.dtype for name, weight in session.model.weights.items()}
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {"conv_in.weight", "conv_in.bias"}
    assert set(dtypes.values()) == {"float32", "bfloat16"}
    assert str(tmp_path / "unet" / "diffusion_pytorch_model.safetensors") in Path("/proc/self/maps").read_text()
    session.cast("conv_out", "float16")
    session.export(tmp_path / "out")
    held = diffusers.UNet2DConditionModel.from_config(json.loads((tmp_path / "out" / "config.json").read_text()))
    held.load_state_dict(load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors"), assign=True)
    assert (held.conv_out.weight.dtype, held.conv_in.weight.dtype) == (torch.float16, torch.float32)


def test_overflow_in_a_float16_vae_is_located_and_remedied(pipelines: Path, tmp_path: Path) -> None:
    """A residual block whose output exceeds the largest float16, as that of SDXL's VAE does."""
    import diffusers

    vae = diffusers.AutoencoderKL.from_pretrained(save_pipeline("sdxl", pipelines) / "vae")
    with torch.no_grad():
        vae.decoder.up_blocks[0].resnets[1].conv2.weight *= 3e5
    vae.save_pretrained(tmp_path / "vae")
    session = de.open(str(tmp_path / "vae"))
    session.cast("*", "float16")
    report = session.drift()
    assert report.output.nonfinite == report.output.elements
    found = session.nonfinite(report)
    assert found is not None
    assert (found.module, found.dtype) == ("decoder.up_blocks.0.resnets.1.conv2", "float16")
    assert found.remedy
    before = session.plan.planned_bytes
    session.apply(de.Recipe.of([*session.recipe.rules, *map(de.Rule.parse, found.remedy)]))
    assert session.drift().output.nonfinite == 0
    assert session.plan.planned_bytes < before * 1.5, "far less than the whole VAE in float32"


def test_component_option_opens_a_component_or_is_refused_with_the_reason(
    pipelines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_pipeline("sdxl", pipelines)
    assert run(cli, "dtype-engine", ["drift", str(folder), "--component", "vae", "--cast", "*=bf16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["inputs"]) == ("vae", "2 calls of random latents of a picture")
    assert run(cli, "dtype-engine", ["drift", str(folder), "--component", "vea"]) == 2
    assert "has no component vea; it has text_encoder, text_encoder_2, unet, vae" in capsys.readouterr().err
    with pytest.raises(UserError, match="takes latents"):
        de.open(str(folder / "unet"), options=de.Options(prompts=("a cat",)))
    for change, reason in (
        ({"_class_name": "NoSuchModel"}, "has no model NoSuchModel"),
        ({"_class_name": "DDIMScheduler"}, "has no model DDIMScheduler"),
        ({"block_out_channels": [64, 64]}, "these are not one model"),
    ):
        copied = tmp_path / str(len(list(tmp_path.iterdir())))
        copied.mkdir()
        config = json.loads((folder / "vae" / "config.json").read_text())
        (copied / "config.json").write_text(json.dumps(config | change))
        shutil.copy(folder / "vae" / "diffusion_pytorch_model.safetensors", copied)
        with pytest.raises((NoForward, UserError), match=reason):
            de.open(str(copied))


def what_the_pipeline_passes(family: str, component: str, prompt: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments by name that a pipeline of diffusers passes to a component in a run of 2 steps."""
    torch.manual_seed(0)
    pipeline = FAMILIES[family]()
    pipeline.set_progress_bar_config(disable=True)
    for each in pipeline.components.values():
        if isinstance(each, torch.nn.Module):
            each.eval()
    part = getattr(pipeline, component)
    name = "decode" if component == "vae" else "forward"
    original, calls = getattr(part, name), []

    def seen(*args: Any, **kwargs: Any) -> Any:
        bound = dict(inspect.signature(original).bind(*args, **kwargs).arguments)
        if name == "decode":
            bound["z"] = next(iter(bound.values()))
        kept = {key: value for key, value in bound.items() if key not in ("return_dict", "generator", "latents")}
        calls.append(copy.deepcopy(kept))
        return original(*args, **kwargs)

    setattr(part, name, seen)
    pipeline(**prompt, num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="pt")
    return calls


@pytest.mark.parametrize(("family", "component"), [("sdxl", "vae"), ("sdxl", "unet"), ("wan", "transformer")])
def test_model_of_unknown_class_runs_on_the_inputs_of_its_pipeline(
    pipelines: Path, family: str, component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtype_engine.runtime.inputs.diffusers_inputs._MAKERS", {})
    monkeypatch.setattr("dtype_engine.runtime.inputs.diffusers_inputs._PICTURE", 32)
    monkeypatch.setattr("dtype_engine.runtime.inputs.diffusers_inputs._VIDEO", 32)
    folder = save_pipeline(family, pipelines) / component
    session = de.open(str(folder), options=de.Options(settings=de.RunSettings(float_inputs="model")))
    run_with = {"prompt": "a photograph of a cat", "height": 32, "width": 32}
    if family == "wan":
        run_with |= {"num_frames": 9, "max_sequence_length": 64}
    calls = what_the_pipeline_passes(family, component, run_with)
    recorded = [batch.kwargs for batch in session.need_inputs().batches]
    for call, passed in zip(recorded, calls, strict=True):
        torch.testing.assert_close(call, {name: passed[name] for name in call}, atol=1e-4, rtol=1e-4)
        assert all(value is None for name, value in passed.items() if name not in call)
    session.cast("*", "bfloat16")
    report = session.drift()
    assert f"{len(calls)} call" in report.inputs
    assert f"that {family} makes for 1 " in report.inputs
    reference, candidate = (in_diffusers(folder, recorded, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert report.output.elements == len(reference)
    assert report.output.mean_abs == pytest.approx((candidate - reference).abs().mean().item(), abs=1e-6)
    assert report.output.rel_l2 == pytest.approx(((candidate - reference).norm() / reference.norm()).item(), abs=1e-6)


def test_component_runs_by_an_unconditional_pipeline_and_not_by_a_broken_one(tmp_path: Path) -> None:
    import diffusers

    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=16, layers_per_block=1, block_out_channels=(32, 64), down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
    )  # fmt: skip
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(tmp_path / "ddpm")
    session = de.open(str(tmp_path / "ddpm" / "unet"))
    assert session.need_inputs().description == "2 calls that ddpm makes for 1 unconditional call, 2 steps"
    session.cast("*", "bfloat16")
    assert session.drift().output.rel_l2 < 0.1
    shutil.rmtree(tmp_path / "ddpm" / "scheduler")
    unknown = "nothing says what to run a UNet2DModel on"
    with pytest.raises(NoForward, match=f"{unknown}.*; nor can the pipeline around it: ddpm"):
        de.open(str(tmp_path / "ddpm" / "unet")).drift()
    (tmp_path / "ddpm" / "model_index.json").unlink()
    with pytest.raises(NoForward, match=unknown):
        de.open(str(tmp_path / "ddpm" / "unet")).drift()


def test_float32_parameters_are_those_that_diffusers_keeps(pipelines: Path) -> None:
    """`WanTransformer3DModel` declares modules and a parameter: what has one of the words among the parts of its name."""
    import diffusers

    tree = de.open(str(save_pipeline("wan", pipelines) / "transformer")).tree
    words = set(diffusers.WanTransformer3DModel._keep_in_fp32_modules)
    attribute = "(_keep_in_fp32_modules)"
    declared = {name for name, module in tree.modules.items() if attribute in (module.keep_in_fp32 or "")}
    kept = {tensor.name for module in declared for tensor in tree.below(module)} | tree.kept_in_fp32.keys()
    assert kept == {name for name in tree.tensors if words & set(name.split("."))}
    assert set(tree.kept_in_fp32) == {"scale_shift_table", "blocks.0.scale_shift_table", "blocks.1.scale_shift_table"}
    islands = presets.preset("islands-fp32").recipe(tree)
    decided = make_plan(tree, islands).decided_by
    assert {name for name in kept if tree.tensors[name].persistent} <= decided.keys()
