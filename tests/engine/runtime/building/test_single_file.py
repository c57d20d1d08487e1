"""Single files of diffusion models have the weights that diffusers' own loaders read, and the drift of plain diffusers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.pipelines import make_pipeline, save_pipeline
from tests.helpers.single_files import sd3_transformer, stable_diffusion

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run

pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("single")


def without_weights(folder: Path, target: Path) -> Path:
    """Copy a pipeline's folder, but no weights."""
    if not target.is_dir():
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
    return target


@pytest.fixture(scope="module")
def sd15(folders: Path) -> tuple[Path, Path]:
    """A single file in float16, and the folder of its configuration, without weights."""
    config = without_weights(save_pipeline("sd15", folders), folders / "sd15 config")
    return stable_diffusion(make_pipeline("sd15"), folders / "sd15.safetensors", torch.float16), config


def held_by(session: de.Session) -> dict[str, torch.Tensor]:
    return {name: weight.tensor for name, weight in session.model.weights.items()}


def parts_of(pipeline: Any) -> dict[str, torch.Tensor]:
    """Return all tensors of a pipeline's models, under the names that they have in our tree."""
    return {
        f"{name}.{key}": tensor
        for name, part in pipeline.components.items()
        if isinstance(part, torch.nn.Module)
        for key, tensor in part.state_dict().items()
    }


def picture(pipeline: Any, dtypes: dict[str, torch.dtype]) -> torch.Tensor:
    """Return the picture of plain diffusers in float64, with the tensors of each named component in a dtype."""
    pipeline.set_progress_bar_config(disable=True)
    for name, dtype in dtypes.items():
        for tensor in getattr(pipeline, name).state_dict(keep_vars=True).values():
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    generator = torch.Generator().manual_seed(0)
    call = {"num_inference_steps": 2, "height": 16, "width": 16, "generator": generator, "output_type": "pt"}
    return torch.as_tensor(pipeline("a cat", **call)[0]).double()


def test_pipeline_in_a_single_file_equals_that_of_diffusers(sd15: tuple[Path, Path]) -> None:
    import diffusers

    path, config = sd15
    options = de.Options(config=config, prompts=("a cat",), pipeline=de.PipelineSettings(steps=2, size=(16, 16)))
    session = de.open(str(path), options=options)

    def plain() -> Any:
        return diffusers.StableDiffusionPipeline.from_single_file(str(path), config=str(config), local_files_only=True)

    wanted, held = parts_of(plain()), held_by(session)
    floats = {name for name, tensor in wanted.items() if tensor.is_floating_point()}
    assert floats == {name for name, tensor in held.items() if tensor.is_floating_point()}
    originals = parts_of(make_pipeline("sd15"))
    for name in floats:
        assert held[name].dtype == torch.float16
        assert torch.equal(held[name].float(), wanted[name].float()), name
        assert torch.equal(held[name], originals[name].half()), name
    reference = picture(plain(), dict.fromkeys(("unet", "vae", "text_encoder"), torch.float32))
    candidate = picture(plain(), {"unet": torch.bfloat16, "vae": torch.bfloat16, "text_encoder": torch.bfloat16})
    session.cast("*", "bfloat16")
    output = session.drift().output
    assert output.max_abs == pytest.approx((candidate - reference).abs().max().item(), abs=1e-6)
    assert output.mean_abs == pytest.approx((candidate - reference).abs().mean().item(), abs=1e-6)
    assert output.max_abs > 0


@pytest.mark.parametrize("name", ["unet", "vae"])
def test_component_in_a_single_file_equals_that_of_diffusers(sd15: tuple[Path, Path], name: str) -> None:
    import diffusers

    path, config = sd15
    session = de.open(str(path), options=de.Options(config=config / name))
    model_class = {"unet": diffusers.UNet2DConditionModel, "vae": diffusers.AutoencoderKL}[name]
    module = model_class.from_single_file(str(path), config=str(config), subfolder=name, local_files_only=True).eval()
    held = held_by(session)
    assert {key: tensor.half() for key, tensor in module.state_dict().items()}.keys() == held.keys()
    assert all(torch.equal(tensor.float(), held[key].float()) for key, tensor in module.state_dict().items())
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        module.to(dtype)
        call = session.need_inputs().batches[0].kwargs
        call = {key: value.to(dtype) if key != "timestep" else value for key, value in call.items()}
        with torch.no_grad():
            outputs.append((module(**call) if name == "unet" else module.decode(**call))[0].double())
    session.cast("*", "bfloat16")
    session.settings = de.RunSettings(float_inputs="model")
    output = session.drift().output
    half = outputs[0].numel()  # of two calls
    assert output.elements == 2 * half
    assert output.max_abs >= (outputs[1] - outputs[0]).abs().max().item() - 1e-6 > 0


def test_transformer_whose_projections_are_joined_equals_that_of_diffusers(folders: Path) -> None:
    import diffusers

    config = without_weights(save_pipeline("sd3", folders), folders / "sd3 config") / "transformer"
    original = make_pipeline("sd3").transformer
    path = sd3_transformer(original, folders / "sd3.safetensors", torch.bfloat16)
    held = held_by(de.open(str(path), options=de.Options(config=config)))
    plain = diffusers.SD3Transformer2DModel.from_single_file(str(path), config=str(config), local_files_only=True)
    state = {key: each for key, each in plain.state_dict().items() if each.is_floating_point()}
    for key, tensor in state.items():
        assert torch.equal(held[key], tensor.bfloat16()), key
        assert torch.equal(held[key], original.state_dict()[key].bfloat16()), key


def test_flux_transformer_with_names_of_diffusers_runs_with_the_rest_of_its_pipeline(folders: Path) -> None:
    """A file with diffusers' own names needs no converter, whatever its size. What the file lacks is read from the folder."""
    folder = save_pipeline("flux", folders)
    config = folders / "flux config"
    shutil.copytree(folder, config)
    stored = load_file(config / "transformer" / "diffusion_pytorch_model.safetensors")
    (config / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    save_file({name: tensor.bfloat16() for name, tensor in stored.items()}, folders / "flux.safetensors")
    settings = de.PipelineSettings(steps=2, size=(16, 16))
    options = de.Options(config=config, prompts=("a cat",), pipeline=settings)
    session = de.open(str(folders / "flux.safetensors"), options=options)
    assert "not from the file: text_encoder, text_encoder_2, vae" in " ".join(session.model.notices)
    reference, candidate = make_pipeline("flux"), make_pipeline("flux")
    for pipeline in (reference, candidate):
        pipeline.transformer.load_state_dict({name: tensor.bfloat16().float() for name, tensor in stored.items()})
    parts = ("transformer", "vae", "text_encoder", "text_encoder_2")
    wanted = picture(candidate, dict.fromkeys(parts, torch.float16)) - picture(reference, {})
    session.cast("*", "float16")
    assert session.drift().output.max_abs == pytest.approx(wanted.abs().max().item(), abs=1e-6)


def test_gguf_file_of_a_transformer_has_the_values_that_gguf_decodes(folders: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    config = without_weights(save_pipeline("flux", folders), folders / "flux gguf") / "transformer"
    state = make_pipeline("flux").transformer.state_dict()
    writer = gguf.GGUFWriter(tmp_path / "flux.gguf", "flux")
    wanted = {}
    for name, tensor in state.items():
        values = tensor.float().numpy()
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            codes = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, codes, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            values = gguf.quants.dequantize(codes, gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)
        wanted[name] = torch.from_numpy(np.ascontiguousarray(values))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    session = de.open(str(tmp_path / "flux.gguf"), options=de.Options(config=config))
    held = held_by(session)
    assert all(torch.equal(held[name].float(), tensor) for name, tensor in wanted.items())
    assert any("decoded to float32" in notice for notice in session.model.notices)
    session.cast("*", "bfloat16")
    assert session.drift().output.max_abs > 0


def test_commands_read_a_single_file(
    sd15: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, config = sd15
    given = [str(path), "--config", str(config)]
    assert run(cli, "dtype-engine", ["inspect", *given, "--cast", "unet=bf16", "--depth", "1"]) == 0
    assert "UNet2DConditionModel" in capsys.readouterr().out
    assert run(cli, "dtype-engine", ["weights", *given, "--cast", "unet.conv_in=bf16", "--json"]) == 0
    assert "unet.conv_in.weight" in capsys.readouterr().out
    out = tmp_path / "out"
    assert run(cli, "dtype-engine", ["export", *given, "--cast", "unet=bf16", "-o", str(out)]) == 0
    tensors = load_file(next(out.glob("*.safetensors")))
    assert {tensor.dtype for name, tensor in tensors.items() if name.startswith("unet.")} == {torch.bfloat16}
    originals = parts_of(make_pipeline("sd15"))
    assert all(torch.equal(tensors[name], originals[name].half()) for name in tensors if name.startswith("vae."))
    capsys.readouterr()
    assert run(cli, "dtype-engine", ["verify", str(out), "--against", *given]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{file}", "--config", "{root}"], "has no configuration: name a folder with the model_index.json"),
        (
            ["{config}", "--config", "{config}"],
            "--config goes with a single file of a diffusion model, and sd15 config is none",
        ),
        (["{file}"], "it is a single file of a diffusion model. Name the folder of its configuration with --config"),
        (["{file}", "--config", "{flux}"], "most of its 1,660,021 parameters have no place in the pipeline in"),
        (["{file}", "--config", "{flux}/transformer"], "has no FluxTransformer2DModel that diffusers' converter knows"),
        (["{unet}", "--config", "{config}"], "nor are there weights in"),
    ],
)
def test_file_without_a_matching_configuration_is_refused_in_one_line(
    sd15: tuple[Path, Path], folders: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, config = sd15
    unet = folders / "unet.safetensors"
    save_file({name: each for name, each in load_file(path).items() if name.startswith("model.")}, unet)
    names = {"file": path, "config": config, "root": folders, "flux": save_pipeline("flux", folders), "unet": unet}
    given = [argument.format(**names) for argument in arguments]
    capsys.readouterr()
    assert run(cli, "dtype-engine", ["drift", *given, "--cast", "*=bf16"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_two_single_files_are_not_compared(sd15: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    path, config = sd15
    assert run(cli, "dtype-engine", ["drift", str(path), "--against", str(path), "--config", str(config)]) == 2
    assert "two single files can't be compared" in capsys.readouterr().err


def test_configuration_of_other_sizes_is_refused(sd15: tuple[Path, Path], tmp_path: Path) -> None:
    path, config = sd15
    shutil.copytree(config / "unet", tmp_path / "unet")
    file = tmp_path / "unet" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"cross_attention_dim": 16}))
    with pytest.raises(de.UserError, match="has another UNet2DConditionModel than its configuration"):
        de.open(str(path), options=de.Options(config=tmp_path / "unet")).drift()
