"""Pictures of a pipeline that is called with settings, or that starts from a picture, are those of plain diffusers."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.pipelines import make_pipeline, save_pipeline

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.pipeline_settings import PipelineSettings, parse_settings

pytest.importorskip("diffusers")

Picture = torch.Tensor


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image

    path = tmp_path_factory.mktemp("photo") / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)).save(path)
    return path


def plain(family: str, call: Callable[[Any, torch.Generator], Any], dtype: torch.dtype, seed: int = 0) -> Picture:
    """Return the picture of plain diffusers in float64, from a pipeline whose models are in `dtype`."""
    pipeline = make_pipeline(family)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            for tensor in part.state_dict(keep_vars=True).values():
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(dtype)
    return torch.as_tensor(call(pipeline, torch.Generator().manual_seed(seed))[0]).double()


def assert_drift_equals(
    session: de.Session, family: str, call: Callable[[Any, torch.Generator], Any], seed: int = 0
) -> None:
    """Assert that the drift in bfloat16 is that between two pictures of plain diffusers."""
    reference, candidate = (plain(family, call, dtype, seed) for dtype in (torch.float32, torch.bfloat16))
    session.cast("*", "bfloat16")
    output = session.drift().output
    assert output.elements == reference.numel()
    assert output.max_abs == pytest.approx((candidate - reference).abs().max().item(), abs=1e-6)
    assert output.mean_abs == pytest.approx((candidate - reference).abs().mean().item(), abs=1e-6)
    assert output.max_abs > 0


SETTINGS: dict[str, tuple[str, PipelineSettings, dict[str, Any]]] = {
    "steps and size": (
        "sd15",
        PipelineSettings(steps=3, size=(32, 24)),
        {"num_inference_steps": 3, "width": 32, "height": 24},
    ),
    "seed": (
        "sd3",
        PipelineSettings(seed=11, size=(16, 16), steps=2),
        {"num_inference_steps": 2, "width": 16, "height": 16},
    ),
    "guidance": (
        "sdxl",
        PipelineSettings(guidance=2.5, size=(16, 16), steps=2),
        {"num_inference_steps": 2, "width": 16, "height": 16, "guidance_scale": 2.5},
    ),
    "guidance of flux": (
        "flux",
        PipelineSettings(guidance=2.5, size=(16, 16), steps=2),
        {"num_inference_steps": 2, "width": 16, "height": 16, "guidance_scale": 2.5},
    ),
    "negative prompt": (
        "sd15",
        PipelineSettings(negative_prompt="a dog", size=(16, 16), steps=2),
        {"num_inference_steps": 2, "width": 16, "height": 16, "negative_prompt": "a dog"},
    ),
    "negative prompt of flux": (
        "flux",
        PipelineSettings(negative_prompt="a dog", true_cfg=3.0, size=(16, 16), steps=2),
        {"num_inference_steps": 2, "width": 16, "height": 16, "negative_prompt": "a dog", "true_cfg_scale": 3.0},
    ),
    "video": (
        "wan",
        PipelineSettings(negative_prompt="a dog", guidance=3.0, size=(16, 16), steps=2),
        {
            "num_inference_steps": 2,
            "width": 16,
            "height": 16,
            "negative_prompt": "a dog",
            "guidance_scale": 3.0,
            "num_frames": 9,
        },
    ),
}
"""By what is set: the family of the pipeline, our settings, and the arguments of plain diffusers."""


@pytest.mark.parametrize("name", SETTINGS)
def test_drift_with_settings_equals_that_of_plain_diffusers(pipelines: Path, name: str) -> None:
    family, settings, arguments = SETTINGS[name]
    options = de.Options(prompts=("a cat",), pipeline=settings)
    session = de.open(str(save_pipeline(family, pipelines)), options=options)
    assert_drift_equals(
        session,
        family,
        lambda pipeline, generator: pipeline("a cat", generator=generator, output_type="pt", **arguments),
        settings.seed,
    )


def test_each_setting_changes_the_picture(pipelines: Path) -> None:
    """Otherwise, the comparison with plain diffusers could not see that a setting is lost."""
    call = {"num_inference_steps": 2, "width": 16, "height": 16}
    first = plain("sd15", lambda pipeline, g: pipeline("a cat", generator=g, output_type="pt", **call), torch.float32)
    for change in ({"num_inference_steps": 3}, {"guidance_scale": 2.5}, {"negative_prompt": "a dog"}):
        other = plain(
            "sd15",
            lambda pipeline, g, change=change: pipeline("a cat", generator=g, output_type="pt", **call | change),  # type: ignore[misc]
            torch.float32,
        )
        assert not torch.equal(first, other), change


@pytest.mark.parametrize("family", ["sd15", "sdxl", "sd3", "flux"])
def test_drift_of_image_to_image_equals_that_of_plain_diffusers(pipelines: Path, photo: Path, family: str) -> None:
    import diffusers
    from PIL import Image

    settings = PipelineSettings(steps=5, size=(32, 16), strength=0.5, guidance=2.0, seed=3)
    options = de.Options(prompts=("a cat",), images=(photo,), pipeline=settings)
    session = de.open(str(save_pipeline(family, pipelines)), options=options)
    image = Image.open(photo).convert("RGB").resize((32, 16), Image.Resampling.LANCZOS)
    sides = {} if family in ("sd15", "sdxl") else {"width": 32, "height": 16}

    def call(pipeline: Any, generator: torch.Generator) -> Any:
        return diffusers.AutoPipelineForImage2Image.from_pipe(pipeline)(
            "a cat", image=image, strength=0.5, guidance_scale=2.0, num_inference_steps=5, generator=generator,
            output_type="pt", **sides,
        )  # fmt: skip

    assert_drift_equals(session, family, call, seed=3)
    assert "photo.png, 50 x 40, resized to 32 x 16" in session.need_inputs().description


def test_each_prompt_runs_with_each_picture_and_the_next_seed(pipelines: Path, photo: Path) -> None:
    options = de.Options(prompts=("a", "b"), images=(photo, photo), pipeline=PipelineSettings(seed=7))
    inputs = de.open(str(save_pipeline("sd15", pipelines)), options=options).need_inputs()
    calls = [(batch.kwargs["prompt"], int(batch.kwargs["seed"])) for batch in inputs.batches]
    assert calls == [("a", 7), ("a", 8), ("b", 9), ("b", 10)]
    assert {tuple(batch.kwargs["image"].shape) for batch in inputs.batches} == {
        (24, 32, 3)
    }  # the default size is 32 x 32
    assert inputs.made_of == ("2 prompts with each of 2 pictures with the seeds 7, 8, ...; 4 steps",)


def test_image_to_image_pipeline_without_a_picture_starts_from_a_synthetic_one(pipelines: Path, tmp_path: Path) -> None:
    import diffusers

    diffusers.AutoPipelineForImage2Image.from_pipe(make_pipeline("sd15")).save_pretrained(tmp_path / "made")
    session = de.open(str(tmp_path / "made"))
    assert session.need_inputs().description == "1 default prompt with a synthetic picture, 32 x 32, 4 steps"
    session.cast("*", "bfloat16")
    assert session.drift().output.max_abs > 0


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("dit", {"negative_prompt": "a dog"}, "DiTPipeline takes no negative prompt: leave it out"),
        ("dit", {"size": (32, 32)}, "DiTPipeline takes no size: leave it out"),
        ("sd15", {"strength": 0.5}, "StableDiffusionPipeline takes no strength: leave it out"),
        ("sd15", {"true_cfg": 2.0}, "StableDiffusionPipeline takes no true_cfg_scale: leave it out"),
        ("sd15", {"size": (33, 32)}, "with sides of multiples of 2 pixels, not 33 x 32"),
        ("flux", {"size": (30, 32)}, "with sides of multiples of 4 pixels, not 30 x 32"),
        ("flux", {"negative_prompt": "a dog"}, "only with a true_cfg_scale above 1, and it is 1.0"),
        ("sd15", {"negative_prompt": "a dog", "guidance": 1.0}, "only with a guidance_scale above 1, and it is 1.0"),
    ],
)
def test_setting_that_a_pipeline_does_not_take_is_refused_in_a_sentence(
    pipelines: Path, family: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(de.UserError) as refused:
        de.open(
            str(save_pipeline(family, pipelines)), options=de.Options(pipeline=PipelineSettings(**settings))
        ).need_inputs()
    assert said in str(refused.value)


def test_pictures_and_settings_that_do_not_apply_are_refused(pipelines: Path, photo: Path) -> None:
    wan = str(save_pipeline("wan", pipelines))
    with pytest.raises(de.UserError, match="WanPipeline starts from no picture; leave --image out"):
        de.open(wan, options=de.Options(images=(photo,))).need_inputs()
    sd15 = str(save_pipeline("sd15", pipelines))
    with pytest.raises(de.UserError, match=r"4 steps with a strength of 0\.2 are less than one step"):
        de.open(sd15, options=de.Options(images=(photo,), pipeline=PipelineSettings(strength=0.2))).need_inputs()
    settings = PipelineSettings(steps=2, negative_prompt="a dog")
    for model in ("demo", f"{wan}/transformer"):
        with pytest.raises(de.UserError, match="steps, negative-prompt: such settings are for the calls that a whole"):
            de.open(model, options=de.Options(pipeline=settings)).need_inputs()


def test_flux_without_guidance_embeddings_refuses_a_guidance_scale(pipelines: Path, tmp_path: Path) -> None:
    import diffusers

    pipeline = make_pipeline("flux")
    config = dict(pipeline.transformer.config) | {"guidance_embeds": False}
    pipeline.transformer = diffusers.FluxTransformer2DModel.from_config(config)
    pipeline.save_pretrained(tmp_path / "schnell")
    with pytest.raises(de.UserError, match="has no effect of a guidance scale: guidance_embeds"):
        de.open(str(tmp_path / "schnell"), options=de.Options(pipeline=PipelineSettings(guidance=2.0))).need_inputs()


def test_settings_on_the_command_line_are_those_of_plain_diffusers(
    pipelines: Path, photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    folder = save_pipeline("sd15", pipelines)
    arguments = [
        "drift", str(folder), "--cast", "*=bf16", "--prompt", "a cat", "--steps", "3", "--size", "32x16", "--seed", "5",
        "--guidance", "3", "--negative-prompt", "a dog", "--save-pictures", str(tmp_path / "out"), "--json",
    ]  # fmt: skip
    assert run(cli, "dtype-engine", arguments) == 0
    report = json.loads(capsys.readouterr().out)
    described = '1 prompt, 3 steps, 32 x 16 pixels, guidance scale 3.0, negative prompt "a dog", seed 5'
    assert report["inputs"] == described
    wanted = plain(
        "sd15",
        lambda pipeline, generator: pipeline(
            "a cat", negative_prompt="a dog", guidance_scale=3.0, num_inference_steps=3, width=32, height=16,
            generator=generator, output_type="pt",
        ),
        torch.float32,
        seed=5,
    )  # fmt: skip
    held = np.asarray(Image.open(tmp_path / "out" / "1-reference.png"))
    assert np.abs(held - (255 * wanted[0]).round().movedim(0, -1).numpy()).max() <= 1
    with_picture = ["drift", str(folder), "--cast", "*=bf16", "--image", str(photo), "--strength", "0.5"]
    assert run(cli, "dtype-engine", with_picture) == 0
    assert "photo.png, 50 x 40, resized to 32 x 24, 4 steps, strength 0.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--size", "32"], "Invalid value for '--size': '32': give WIDTHxHEIGHT in pixels, such as 512x384"),
        (["--size", "3x4"], "PipelineSettings.size[0]: expected int >= 8"),
        (["--steps", "0"], "Invalid value for '--steps': 0 is not in the range 1<=x<=1000"),
        (["--guidance", "-1"], "Invalid value for '--guidance': -1.0 is not in the range 0<=x<=1000"),
        (["--guidance", "nan"], "PipelineSettings.guidance: expected float >= 0.0"),
        (["--strength", "0"], "Invalid value for '--strength': 0.0 is not in the range 0<x<=1"),
        (["--seed", str(1 << 40)], "Invalid value for '--seed'"),
        (["--steps", "2"], "steps: such settings are for the calls that a whole pipeline of diffusers makes"),
    ],
)
def test_invalid_setting_is_refused_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli, "dtype-engine", ["drift", "demo", "--cast", "*=bf16", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_line_of_settings_changes_those_that_it_names() -> None:
    before = PipelineSettings(steps=3, seed=4)
    assert parse_settings("size=64x32 guidance=2 negative-prompt='a dog, text'", before) == PipelineSettings(
        steps=3, seed=4, size=(64, 32), guidance=2.0, negative_prompt="a dog, text"
    )
    for prompt in ("a cat", "steps", "steps=3 cats", "it's steps=3", "x=3", ""):
        assert parse_settings(prompt, before) is None
    for line, said in (
        ("steps=many", "steps: expected int"),
        ("size=3", "size='3': give"),
        ("strength=2", "strength: expected"),
    ):
        with pytest.raises(de.UserError, match=said):
            parse_settings(line, before)
    again = pickle.loads(pickle.dumps(before))
    assert (again, str(again)) == (before, "steps=3 seed=4")
