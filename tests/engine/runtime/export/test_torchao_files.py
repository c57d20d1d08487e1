"""Exports of diffusers models with scales: the values that diffusers and transformers load by torchao, and what is refused.

The expected values are computed here in plain torch: codes by the largest |value| of a row or of the whole weight.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.exporting import engine, read

import dtype_engine as de
from dtype_engine.checkpoint import open_checkpoint

SIZES = {
    "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8, "num_layers": 2, "sample_size": 8,
    "patch_size": 2, "num_embeds_ada_norm": 10, "norm_num_groups": 2,
}  # fmt: skip
CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
FORMATS = ("int8", "fp8", "int8@tensor", "fp8@tensor")
BIASES = ("--cast", "*.bias=stored")


@pytest.fixture
def torchao() -> Any:
    pytest.importorskip("diffusers")
    return pytest.importorskip("torchao")


def transformer() -> Any:
    import diffusers

    torch.manual_seed(0)
    return diffusers.DiTTransformer2DModel(**SIZES).eval()


@pytest.fixture
def source(torchao: Any, tmp_path: Path) -> Path:
    """A small transformer of diffusers, in float32."""
    transformer().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def rounded(weight: torch.Tensor, form: str) -> torch.Tensor:
    """Return a weight, float32 [out, in], as its codes and scales give it."""
    name, _, whole = form.partition("@")
    dtype, largest = CODES[name]
    scale = (weight.abs().amax() if whole else weight.abs().amax(1, keepdim=True)) / largest
    codes = (weight / scale).round() if name == "int8" else weight / scale
    return codes.to(dtype).float() * scale


def linears(module: torch.nn.Module) -> list[str]:
    return [name for name, each in module.named_modules() if isinstance(each, torch.nn.Linear)]


def decoded(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a module, with the values of torchao's weights."""
    return {
        name: weight.dequantize() if hasattr(weight, "qdata") else weight
        for name, weight in module.state_dict().items()
    }


@pytest.mark.parametrize("form", FORMATS)
def test_diffusers_loads_the_values_of_codes_and_scales(source: Path, tmp_path: Path, form: str) -> None:
    import diffusers

    out, expected = tmp_path / "out", transformer()
    assert engine("export", source, "--cast", f"type:Linear={form}", *BIASES, "-o", out) == 0
    names = linears(expected)
    with torch.no_grad():
        for name in names:
            expected.get_submodule(name).weight.copy_(rounded(expected.get_submodule(name).weight, form))
    loaded = diffusers.DiTTransformer2DModel.from_pretrained(out, dtype=torch.float32)
    assert all(hasattr(loaded.get_submodule(name).weight, "qdata") for name in names)
    values = decoded(loaded)
    for name, weight in expected.state_dict().items():
        assert torch.equal(values[name], weight), name
    call = {"timestep": torch.tensor([3]), "class_labels": torch.tensor([1])}
    latents = torch.ones(1, 4, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(loaded(latents, **call).sample, expected(latents, **call).sample)
    assert engine("verify", out, "--against", source) == 0
    ours = de.load_pretrained(out, module=transformer()).state_dict()
    assert all(torch.equal(ours[name], weight) for name, weight in expected.state_dict().items())
    assert de.open(str(out)).tree.tensors[f"{names[0]}.weight"].dtype.startswith("torchao:")


def test_layers_in_several_formats_and_files_have_torchao_settings_of_their_own(source: Path, tmp_path: Path) -> None:
    import diffusers

    out, expected = tmp_path / "out", transformer()
    rules = ("--cast", "*.attn1.*=int8", "--cast", "*.ff.*=fp8@tensor", *BIASES)
    assert engine("export", source, *rules, "--max-shard-size", "20KB", "-o", out) == 0
    assert len(list(out.glob("*.safetensors"))) > 2
    loaded = diffusers.DiTTransformer2DModel.from_pretrained(out, dtype=torch.float32)
    values = decoded(loaded)
    settings = json.loads((out / "config.json").read_text())["quantization_config"]["quant_type"]["default"]
    by_layer = settings["_data"]["fqn_to_config"]
    for name in linears(expected):
        weight = expected.get_submodule(name).weight.detach()
        form = "int8" if ".attn1." in name else "fp8@tensor" if ".ff." in name else ""
        assert torch.equal(values[f"{name}.weight"], rounded(weight, form) if form else weight), name
        kind = {"": None, "int8": "Int8WeightOnlyConfig", "fp8@tensor": "Float8WeightOnlyConfig"}[form]
        assert by_layer.get(name, {"_type": None})["_type"] == kind
    assert engine("verify", out, "--against", source) == 0


def test_torchao_weights_are_computed_with_in_the_dtype_of_the_others(source: Path, tmp_path: Path) -> None:
    import diffusers

    out, expected = tmp_path / "out", transformer()
    rules = ("--cast", "*=bf16", "--cast", "type:Linear=fp8", "--cast", "proj_out_1=bf16", "--cast", "*.bias=bf16")
    assert engine("export", source, *rules, "-o", out) == 0
    assert "dtype=torch.bfloat16" in (out / "README.md").read_text()
    loaded = diffusers.DiTTransformer2DModel.from_pretrained(out, dtype=torch.bfloat16)
    assert {weight.dtype for weight in loaded.state_dict().values()} == {torch.bfloat16}
    weight = rounded(expected.proj_out_2.weight.detach(), "fp8")
    assert torch.equal(loaded.proj_out_2.weight.dequantize(), weight.bfloat16())
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["modules_to_not_convert"] == ["proj_out_1"]
    call = {"timestep": torch.tensor([3]), "class_labels": torch.tensor([1])}
    with torch.no_grad():
        assert loaded(torch.ones(1, 4, 8, 8, dtype=torch.bfloat16), **call).sample.isfinite().all()


@pytest.mark.parametrize(
    "kept", [(), ("--cast", "{*.norm2,*.scale_shift_table,scale_shift_table,*.time_embedder.*.bias}=f32")]
)
def test_layer_that_diffusers_keeps_in_float32_computes_so_with_its_codes(
    torchao: Any, tmp_path: Path, kept: tuple[str, ...]
) -> None:
    import diffusers

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16}
    made = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), freq_dim=16, ffn_dim=32, num_layers=1, rope_max_seq_len=32, **sizes
    )
    made.save_pretrained(tmp_path / "wan")
    rules = ("--cast", "*=bf16", "--cast", "type:Linear=fp8", "--cast", "*.bias=bf16", *kept)
    assert engine("export", tmp_path / "wan", *rules, "-o", tmp_path / "out") == 0
    assert "dtype=torch.bfloat16" in (tmp_path / "out" / "README.md").read_text()
    loaded = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    layer, before = (module.condition_embedder.time_embedder.linear_1.weight.detach() for module in (loaded, made))
    assert layer.dtype == torch.float32
    assert torch.equal(layer.dequantize(), rounded(before, "fp8"))
    latents, text = torch.ones(1, 4, 1, 4, 4, dtype=torch.bfloat16), torch.ones(1, 5, 16, dtype=torch.bfloat16)
    with torch.no_grad():
        assert loaded(latents, torch.tensor([3]), text).sample.isfinite().all()


def test_pipeline_with_scales_in_all_components_makes_a_picture_in_diffusers(torchao: Any, tmp_path: Path) -> None:
    import diffusers
    from tests.helpers import pipelines

    torch.manual_seed(0)
    made = pipelines.flux()
    made.save_pretrained(tmp_path / "flux")
    out = tmp_path / "out"
    rules = ("--cast", "*=bf16", "--cast", "type:Linear=fp8", "--cast", "*.bias=bf16")
    assert engine("export", tmp_path / "flux", *rules, "-o", out) == 0
    pipeline = diffusers.FluxPipeline.from_pretrained(out, dtype=torch.bfloat16)
    for component in ("transformer", "text_encoder", "text_encoder_2", "vae"):
        loaded, before = getattr(pipeline, component), getattr(made, component)
        values = decoded(loaded)
        assert linears(before)
        for name in linears(before):
            weight = before.get_submodule(name).weight.detach()
            assert torch.equal(values[f"{name}.weight"], rounded(weight, "fp8").bfloat16()), (component, name)
    picture = pipeline("a b", num_inference_steps=1, height=32, width=32, output_type="pt").images
    assert picture.isfinite().all()
    assert engine("verify", out, "--against", tmp_path / "flux") == 0
    ours = de.open(str(out)).tree.tensors
    assert ours["transformer.proj_out.weight"].dtype == "torchao:e4m3@channel"
    for copy, rules in (("same", ()), ("plain", ("--cast", "*=f32"))):
        again = tmp_path / copy
        assert engine("export", out, *rules, "-o", again) == 0
        assert engine("verify", again, "--against", out) == 0
        second = diffusers.FluxPipeline.from_pretrained(again, dtype=torch.bfloat16)
        assert hasattr(second.transformer.proj_out.weight, "qdata") == (copy == "same")
        values = decoded(second.text_encoder)
        for name, weight in decoded(pipeline.text_encoder).items():
            assert torch.equal(values[name], weight), (copy, name)


def test_verify_finds_changed_codes_and_scales_in_torchao_files(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert engine("export", source, "--cast", "type:Linear=int8", *BIASES, "-o", out) == 0
    file = out / "diffusion_pytorch_model.safetensors"
    tensors, metadata = read(file)
    tensors["proj_out_1._weight_qdata"][0, 0] += 1
    tensors["proj_out_2._weight_scale"][0, 0] *= 2
    del metadata["transformer_blocks.0.attn1.to_q.weight"]
    save_file(tensors, file, metadata)
    capsys.readouterr()
    assert engine("verify", out, "--against", source) == 1
    said = capsys.readouterr().out
    assert "values of proj_out_1._weight_qdata differ" in said
    assert "values of proj_out_2._weight_scale differ" in said
    assert "transformer_blocks.0.attn1.to_q.weight should be an Int8Tensor, and the file says nothing of it" in said


def test_export_of_a_torchao_export_is_copied_or_decoded(source: Path, tmp_path: Path) -> None:
    import diffusers

    first, same, plain = tmp_path / "first", tmp_path / "same", tmp_path / "plain"
    assert engine("export", source, "--cast", "type:Linear=int8", *BIASES, "-o", first) == 0
    assert engine("export", first, "-o", same) == 0
    values = decoded(diffusers.DiTTransformer2DModel.from_pretrained(first, dtype=torch.float32))
    copied = diffusers.DiTTransformer2DModel.from_pretrained(same, dtype=torch.float32)
    assert hasattr(copied.proj_out_1.weight, "qdata")
    assert engine("export", first, "--cast", "*=f32", "-o", plain) == 0
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    for loaded in (copied, diffusers.DiTTransformer2DModel.from_pretrained(plain)):
        assert all(torch.equal(weight, values[name]) for name, weight in decoded(loaded).items())
    assert engine("verify", same, "--against", first) == 0
    assert engine("verify", plain, "--against", first) == 0


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (
            ("*=int8",),
            "reads scales of weights of linear layers that are not tied, as the rules type:Linear=i8 and then",
        ),
        (("type:Linear=int4@g32",), "it reads fp8, fp8@t, i8, i8@t in torchao's layout"),
        (("type:Linear=e5m2",), "it reads fp8, fp8@t, i8, i8@t in torchao's layout"),
    ],
)
def test_weights_that_torchao_files_cannot_hold_are_refused(
    source: Path, tmp_path: Path, rules: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    casts = [argument for rule in rules for argument in ("--cast", rule)]
    assert engine("export", source, *casts, "-o", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_other_layouts_and_single_files_of_torchao_weights_are_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = ("--cast", "type:Linear=int8", *BIASES)
    assert engine("export", source, *rules, "--layout", "gptq", "-o", tmp_path / "out") == 2
    assert "diffusers, which loads this, does not read the layout gptq" in capsys.readouterr().err
    assert engine("export", source, *rules, "-o", tmp_path / "out.safetensors") == 2
    assert "name a folder instead" in capsys.readouterr().err


def test_quantized_inputs_that_torchao_files_do_not_declare_are_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = ("--cast", "type:Linear=int8", *BIASES, "--quantize-activations", "weights")
    assert engine("export", source, *rules, "-o", tmp_path / "out") == 0
    assert "activations of weights in int8 will not be quantized by diffusers" in capsys.readouterr().err


def test_copied_torchao_weights_keep_the_names_of_all_tensors_beside_them(tmp_path: Path) -> None:
    source, out = tmp_path / "model.safetensors", tmp_path / "out"
    described = {"_type": "Int8Tensor", "_data": {"block_size": [1, 8]}, "_tensor_data_names": ["qdata", "scale"]}
    texts = {"m.weight": json.dumps(described), "m.bias": '{"_type": "Tensor"}'}
    tensors = {
        "m._weight_qdata": torch.ones(4, 8, dtype=torch.int8), "m._weight_scale": torch.ones(4, 1), "m.bias": torch.ones(4),
    }  # fmt: skip
    save_file(tensors, source, texts | {"tensor_names": json.dumps(["m.weight", "m.bias"])})
    assert engine("export", source, "--cast", "m.bias=bf16", "-o", out) == 0
    written, metadata = read(out / "model.safetensors")
    assert written.keys() == tensors.keys()
    names = json.loads(metadata["tensor_names"])
    assert {name: metadata[name] for name in names} == texts


def test_pipeline_with_torchao_weights_is_read_and_copied_without_diffusers(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "unet").mkdir(parents=True)
    (source / "model_index.json").write_text(json.dumps({"_class_name": "X", "unet": ["diffusers", "Y"]}))
    (source / "unet" / "config.json").write_text(
        '{"_class_name": "Y", "quantization_config": {"quant_method": "torchao"}}'
    )
    described = {"_type": "Int8Tensor", "_data": {"block_size": [1, 8]}, "_tensor_data_names": ["qdata", "scale"]}
    tensors = {"m._weight_qdata": torch.ones(4, 8, dtype=torch.int8), "m._weight_scale": torch.ones(4, 1)}
    file = "unet/diffusion_pytorch_model.safetensors"
    save_file(tensors, source / file, {"m.weight": json.dumps(described), "tensor_names": '["m.weight"]'})
    assert {name: tensor.dtype for name, tensor in open_checkpoint(source).weights.items()} == {
        "unet.m.weight": "torchao:int8@channel"
    }
    assert engine("export", source, "-o", out) == 0
    written, metadata = read(out / file)
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    assert json.loads(metadata["m.weight"]) == described
    assert (out / "unet" / "config.json").read_bytes() == (source / "unet" / "config.json").read_bytes()
    assert engine("verify", out, "--against", source) == 0
    assert engine("export", source, "--cast", "*=bf16", "-o", tmp_path / "plain") == 0
    written, _ = read(tmp_path / "plain" / file)
    assert torch.equal(written["m.weight"], torch.ones(4, 8, dtype=torch.bfloat16))
    assert "quantization_config" not in (tmp_path / "plain" / "unet" / "config.json").read_text()
