"""Drift of diffusers models equals that of plain diffusers with the same tensors cast by hand."""

from __future__ import annotations

import copy
import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.pipelines import COMPONENTS, make_pipeline, save_pipeline

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
    pipeline = make_pipeline(family)
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
    monkeypatch.setattr("dtype_engine.runtime.inputs.pipeline_inputs._PICTURE", 32)
    monkeypatch.setattr("dtype_engine.runtime.inputs.pipeline_inputs._VIDEO", 32)
    folder = save_pipeline(family, pipelines) / component
    session = de.open(str(folder), options=de.Options(settings=de.RunSettings(float_inputs="model")))
    run_with = {"prompt": "a photograph of a cat", "height": 32, "width": 32}
    if family == "wan":
        run_with |= {"num_frames": 9}
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


def test_component_of_an_unconditional_pipeline_runs_unless_the_pipeline_is_damaged(tmp_path: Path) -> None:
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


def test_parameters_listed_as_float32_are_those_that_diffusers_keeps_in_float32(pipelines: Path) -> None:
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


KANDINSKY = {
    "block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 8, "in_channels": 4, "out_channels": 8,
    "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"), "cross_attention_dim": 16, "encoder_hid_dim": 24,
    "attention_head_dim": 4, "resnet_time_scale_shift": "scale_shift",
}  # fmt: skip
PLAIN = {
    "block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 8, "cross_attention_dim": 16,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip
UNETS: dict[str, dict[str, Any]] = {
    "Kandinsky 2.2": KANDINSKY | {"addition_embed_type": "image", "encoder_hid_dim_type": "image_proj"},
    "Kandinsky 2.1": KANDINSKY | {"addition_embed_type": "text_image", "encoder_hid_dim_type": "text_image_proj"},
    "a number of classes": PLAIN | {"num_class_embeds": 4},
    "embeddings of classes": PLAIN | {"class_embed_type": "projection", "projection_class_embeddings_input_dim": 8},
}


@pytest.mark.parametrize("name", UNETS)
def test_unet_gets_the_conditions_that_its_configuration_names(tmp_path: Path, name: str) -> None:
    import diffusers

    torch.manual_seed(0)
    diffusers.UNet2DConditionModel(**UNETS[name]).save_pretrained(tmp_path / "unet")
    session = de.open(str(tmp_path / "unet"), options=de.Options(settings=de.RunSettings(float_inputs="model")))
    calls = [batch.kwargs for batch in session.need_inputs().batches]
    reference, candidate = (in_diffusers(tmp_path / "unet", calls, dtype) for dtype in (torch.float32, torch.bfloat16))
    session.cast("*", "bfloat16")
    assert session.drift().output.max_abs == (candidate - reference).abs().max().item()


def test_export_with_islands_loads_as_it_was_measured(pipelines: Path, tmp_path: Path) -> None:
    """diffusers keeps in float32 what `_keep_in_fp32_modules` of Wan names, also in a model that is loaded in bfloat16."""
    pytest.importorskip("accelerate")
    import diffusers

    source = save_pipeline("wan", pipelines) / "transformer"
    session = de.open(str(source), options=de.Options(settings=de.RunSettings(float_inputs="model")))
    calls = [batch.kwargs for batch in session.need_inputs().batches]
    reference = in_diffusers(source, calls, torch.float32)
    session.cast("*", "bfloat16")
    (notice,) = session.export(tmp_path / "all").notices
    words = r"from_pretrained of diffusers computes 11 tensors in float32, .* with (.*) as the last rules they do not"
    found = re.search(words, notice)
    assert found is not None
    assert "computes 11 tensors in float32" in (tmp_path / "all" / "README.md").read_text()
    for rule in found[1].split(", "):
        session.cast(*rule.split("="))
    measured = session.drift().output
    assert not session.export(tmp_path / "islands").notices
    assert 'from_pretrained("islands", dtype=torch.bfloat16)\n' in (tmp_path / "islands" / "README.md").read_text()
    loaded = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "islands", torch_dtype=torch.bfloat16).eval()
    assert {name: each.dtype for name, each in loaded.state_dict().items()} == {
        name: each.dtype
        for name, each in load_file(tmp_path / "islands" / "diffusion_pytorch_model.safetensors").items()
    }
    with torch.no_grad():
        outputs = [
            loaded(**{name: value.bfloat16() if value.is_floating_point() else value for name, value in call.items()})
            for call in calls
        ]
    difference = torch.cat([output.sample.double().flatten() for output in outputs]) - reference
    assert measured.max_abs == difference.abs().max().item()
    assert measured.mean_abs == pytest.approx(difference.abs().mean().item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_weights_without_scales_are_widened(pipelines: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """As diffusers widens them: norms and biases too. An export has the values that the casts give."""
    shutil.copytree(save_pipeline("sd15", pipelines) / "unet", tmp_path / "unet")
    file = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    stored = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    save_file(stored, file)
    session = de.open(str(tmp_path / "unet"), options=de.Options(settings=de.RunSettings(float_inputs="model")))
    assert session.tree.stored_bytes == sum(tensor.numel() for tensor in stored.values())
    calls = [batch.kwargs for batch in session.need_inputs().batches]
    reference, candidate = (in_diffusers(tmp_path / "unet", calls, each) for each in (torch.float32, torch.bfloat16))
    assert session.drift().output.max_abs == 0
    session.cast("*", "bfloat16")
    assert session.drift().output.max_abs == (candidate - reference).abs().max().item()
    session.export(tmp_path / "out")
    written = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(written[name], tensor.bfloat16()) for name, tensor in stored.items())
