"""Exports of diffusers pipelines and PEFT adapters: in the layout of their source, so that what loads the one loads the other.

What is read back is read by safetensors and transformers, and by diffusers and peft where they are installed.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.helpers import checkpoint_folders
from tests.helpers.exporting import engine, export_checkpoint

import dtype_engine as de
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.core.errors import NoForward


def random_tensors(*names: str, rows: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(rows, 8, generator=generator) for name in names}


def small_clip() -> transformers.CLIPTextModel:
    torch.manual_seed(0)
    config = transformers.CLIPTextConfig(
        hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, vocab_size=100,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.CLIPTextModel(config)


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A diffusers folder with real parts: a text encoder and a tokenizer by transformers, a sharded UNet, a VAE of pickles."""
    folder = tmp_path / "pipeline"
    small_clip().save_pretrained(folder / "text_encoder")
    checkpoint_folders.tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "tokenizer" / "languages").mkdir()
    (folder / "tokenizer" / "languages" / "codes.txt").write_text("en de\n")
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "DDIMScheduler", "steps_offset": 1}\n')
    (folder / "unet").mkdir()
    (folder / "unet" / "config.json").write_text('{"_class_name": "UNet2DConditionModel", "sample_size": 8}\n')
    parts = [random_tensors("conv_in.weight"), random_tensors("mid.weight", "conv_out.weight")]
    names = [f"diffusion_pytorch_model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    for name, tensors in zip(names, parts, strict=True):
        save_file(tensors, folder / "unet" / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, tensors in zip(names, parts, strict=True) for tensor in tensors}
    (folder / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text('{"_class_name": "AutoencoderKL"}\n')
    torch.save(random_tensors("decoder.weight"), folder / "vae" / "diffusion_pytorch_model.bin")
    (folder / "model_index.json").write_text(
        json.dumps(
            {
                "_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.42.1",
                "unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"],
                "text_encoder": ["transformers", "CLIPTextModel"], "tokenizer": ["transformers", "CLIPTokenizer"],
                "scheduler": ["diffusers", "DDIMScheduler"], "safety_checker": [None, None],
            }
        )
    )  # fmt: skip
    (folder / "README.md").write_text("# the source's own\n")
    (folder / "notes.ipynb").write_text("{}")
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A PEFT adapter of two matrices, with the tokenizer that it was trained with."""
    folder = tmp_path / "adapter"
    checkpoint_folders.tokenizer().save_pretrained(folder)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{prefix}.lora_A.weight": torch.randn(4, 32),
        f"{prefix}.lora_B.weight": torch.randn(32, 4),
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt", "trained_by": "hand"})
    config = {"peft_type": "LORA", "base_model_name_or_path": "someone/base", "r": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def of_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_pipeline_is_exported_with_all_folders(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert engine("export", pipeline, "--cast", "*=bf16", "-o", out) == 0
    said = capsys.readouterr()
    expected = files_in(pipeline) - {
        "notes.ipynb", "unet/diffusion_pytorch_model-00001-of-00002.safetensors",
        "unet/diffusion_pytorch_model-00002-of-00002.safetensors", "unet/diffusion_pytorch_model.safetensors.index.json",
    } | {"unet/diffusion_pytorch_model.safetensors", "recipe.yaml"}  # fmt: skip
    assert files_in(out) == expected
    assert "left out, since they are not part of the model: notes.ipynb" in said.err
    assert "copied as they are, since their weights are not in safetensors: vae" in said.err
    for name, tensor in of_folder(pipeline / "unet").items():
        assert torch.equal(of_folder(out / "unet")[name], tensor.to(torch.bfloat16)), name
    loaded = transformers.CLIPTextModel.from_pretrained(out / "text_encoder").state_dict()
    for name, tensor in small_clip().state_dict().items():
        assert torch.equal(loaded[name], tensor.to(torch.bfloat16)), name
    parts = ("scheduler/scheduler_config.json", "tokenizer/languages/codes.txt", "unet/config.json")
    for same in ("model_index.json", *parts):
        assert (out / same).read_bytes() == (pipeline / same).read_bytes()
    before = torch.load(pipeline / "vae" / "diffusion_pytorch_model.bin", weights_only=True)
    after = torch.load(out / "vae" / "diffusion_pytorch_model.bin", weights_only=True)
    assert torch.equal(before["decoder.weight"], after["decoder.weight"])
    transformers.AutoTokenizer.from_pretrained(out / "tokenizer")
    readme = (out / "README.md").read_text()
    assert "StableDiffusionPipeline.from_pretrained" in readme
    assert "# the source's own" not in readme
    assert engine("verify", out, "--against", pipeline) == 0


def test_index_of_a_sharded_component_has_the_file_name_that_its_library_reads(pipeline: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert engine("export", pipeline, "--cast", "unet.mid=f16", "--max-shard-size", "2KB", "-o", out) == 0
    for folder, stem in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
        index = json.loads((out / folder / f"{stem}.safetensors.index.json").read_text())
        there = {file.name: load_file(file) for file in (out / folder).glob("*.safetensors")}
        assert len(there) > 1
        assert {name: file for file, tensors in there.items() for name in tensors} == index["weight_map"]
        assert set(index["weight_map"]) == set(of_folder(pipeline / folder))
    source = of_folder(pipeline / "unet")
    assert torch.equal(of_folder(out / "unet")["mid.weight"], source["mid.weight"].half())
    assert torch.equal(of_folder(out / "unet")["conv_in.weight"], source["conv_in.weight"])
    assert transformers.CLIPTextModel.from_pretrained(out / "text_encoder").dtype == torch.float32
    assert engine("verify", out, "--against", pipeline) == 0


def test_verify_finds_missing_and_changed_files_of_a_pipeline(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert engine("export", pipeline, "-o", out) == 0
    (out / "tokenizer" / "languages" / "codes.txt").unlink()
    (out / "scheduler" / "scheduler_config.json").write_text("{}")
    tensors = load_file(out / "unet" / "diffusion_pytorch_model.safetensors")
    tensors["mid.weight"][0, 0] += 1
    save_file(tensors, out / "unet" / "diffusion_pytorch_model.safetensors")
    capsys.readouterr()
    assert engine("verify", out, "--against", pipeline) == 1
    said = capsys.readouterr().out
    assert "unet.mid.weight 1 of 320 values" in said
    assert "tokenizer/languages/codes.txt is missing" in said
    assert "scheduler/scheduler_config.json is not the file of the source" in said


def test_exported_pipeline_can_be_opened_and_measured_again(pipeline: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert engine("export", pipeline, "--cast", "*=bf16", "--cast", "*.conv_in=f16", "-o", out) == 0
    session = de.open(str(out / "text_encoder"))
    assert session.drift().output.elements > 0
    assert {tensor.dtype for tensor in session.tree.tensors.values() if tensor.persistent and tensor.castable} == {
        "bfloat16"
    }
    for load in (de.open, de.load_pretrained):
        with pytest.raises(NoForward, match=r"open one of its folders|no forward pass without diffusers|does not run"):
            load(str(out))

    class Unet(torch.nn.Module):
        """The names and shapes of the fixture's UNet."""

        def __init__(self) -> None:
            super().__init__()
            self.conv_in, self.mid, self.conv_out = (torch.nn.Linear(8, 40, bias=False) for _ in range(3))

    unet = de.load_pretrained(out / "unet", module=Unet())
    assert {name: tensor.dtype for name, tensor in unet.named_parameters()} == {
        "conv_in.weight": torch.float16, "mid.weight": torch.bfloat16, "conv_out.weight": torch.bfloat16,
    }  # fmt: skip


@pytest.mark.parametrize("target", ["fp8", "int8", "e5m2@tensor"])
def test_scaled_formats_are_refused_for_diffusers_and_peft(
    pipeline: Path, adapter: Path, tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for source, loader in ((pipeline, "diffusers"), (adapter, "PEFT"), (pipeline / "unet", "diffusers")):
        assert engine("export", source, "--cast", f"*={target}", "-o", tmp_path / "out") == 2
        said = capsys.readouterr().err
        assert f"{loader}, which loads this, has no format for weights in " in said
        assert len(said.strip().splitlines()) == 1
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("sharded", [False, True])
def test_fp16_variant_is_exported_without_its_file_suffix(
    tmp_path: Path, sharded: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "variant", tmp_path / "out"
    small_clip().save_pretrained(folder / "text_encoder", variant="fp16", max_shard_size="10KB" if sharded else "1GB")
    (folder / "model_index.json").write_text(
        json.dumps({"_class_name": "X", "text_encoder": ["transformers", "CLIPTextModel"]})
    )
    assert (folder / "text_encoder" / "model.safetensors.index.fp16.json").exists() == sharded
    assert engine("export", folder, "--cast", "*=bf16", "-o", out) == 0
    assert "written without the variant fp16" in capsys.readouterr().err
    assert (out / "text_encoder" / "model.safetensors").is_file()
    loaded = transformers.CLIPTextModel.from_pretrained(out / "text_encoder").state_dict()
    for name, tensor in small_clip().state_dict().items():
        assert torch.equal(loaded[name], tensor.to(torch.bfloat16)), name
    assert de.open(str(folder / "text_encoder")).drift().output.elements > 0


def test_export_omits_other_copies_of_the_weights_and_gives_a_notice(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_clip().half().save_pretrained(pipeline / "text_encoder", variant="fp16")
    torch.save({}, pipeline / "text_encoder" / "pytorch_model.bin")
    assert engine("export", pipeline, "-o", tmp_path / "out") == 0
    assert (
        "left out, since they are other forms of the weights that are written: text_encoder/model.fp16.safetensors, "
        "text_encoder/pytorch_model.bin" in capsys.readouterr().err
    )
    assert not (tmp_path / "out" / "text_encoder" / "pytorch_model.bin").exists()


def test_pipeline_export_skips_symlinks_out_of_a_component_folder(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (pipeline / "scheduler" / "more.txt").symlink_to(tmp_path / "secret.txt")
    (pipeline / "scheduler" / "round").symlink_to(".")
    assert engine("export", pipeline, "-o", tmp_path / "out") == 0
    said = capsys.readouterr().err
    assert "not copied: " in said
    assert "more.txt is a link out of its folder" in said
    assert files_in(tmp_path / "out" / "scheduler") == {"scheduler_config.json"}


def test_cancelled_export_of_a_pipeline_leaves_no_files(pipeline: Path, tmp_path: Path) -> None:
    from dtype_engine.core.errors import Cancelled
    from dtype_engine.recipe import Recipe, Rule

    export = partial(export_checkpoint, open_checkpoint(pipeline), "p", Recipe().then(Rule.parse("*=bf16")))
    told: list[tuple[int, int]] = []
    export(tmp_path / "whole", on_bytes=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1]
    for at in range(0, len(told), max(1, len(told) // 5)):
        answers = iter([False] * at + [True] * 10_000)
        with pytest.raises(Cancelled):
            export(tmp_path / "out", cancelled=lambda answers=answers: next(answers))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["pipeline", "whole"]


def test_exported_diffusers_model_keeps_its_file_names(pipeline: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # With diffusers, the architecture is known, and the fixture has a few of its tensors only.
    assert engine("export", pipeline / "unet", "--cast", "*=bf16", "-o", out, "--incomplete") == 0
    assert files_in(out) == {"config.json", "diffusion_pytorch_model.safetensors", "README.md", "recipe.yaml"}
    assert (out / "config.json").read_bytes() == (pipeline / "unet" / "config.json").read_bytes()
    assert "UNet2DConditionModel.from_pretrained" in (out / "README.md").read_text()
    assert engine("verify", out, "--against", pipeline / "unet") == 0


@pytest.mark.parametrize("shard", ["5GB", "1KB"])
def test_adapter_is_exported_as_an_adapter(adapter: Path, tmp_path: Path, shard: str) -> None:
    out = tmp_path / "out"
    assert engine("export", adapter, "--cast", "*lora_A*=bf16", "--max-shard-size", shard, "-o", out) == 0
    assert files_in(out) == files_in(adapter) | {"README.md", "recipe.yaml"}
    assert (out / "adapter_config.json").read_bytes() == (adapter / "adapter_config.json").read_bytes()
    source = load_file(adapter / "adapter_model.safetensors")
    with safe_open(out / "adapter_model.safetensors", "pt") as written:
        assert written.metadata() == {"format": "pt", "trained_by": "hand"}
        for name, tensor in source.items():
            assert torch.equal(written.get_tensor(name), tensor.bfloat16() if "lora_A" in name else tensor)
    transformers.AutoTokenizer.from_pretrained(out)
    checkpoint = open_checkpoint(out)
    assert (checkpoint.form, checkpoint.base) == ("adapter", "someone/base")
    assert "someone/base" in (out / "README.md").read_text()
    assert engine("verify", out, "--against", adapter) == 0
    with pytest.raises(NoForward, match=r"an adapter alone is no model: someone/base.*; --base"):
        de.load_pretrained(out)


@pytest.fixture
def real_pipeline() -> Any:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=32, attention_head_dim=2, norm_num_groups=4,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=[8, 16], down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
        norm_num_groups=4,
    )  # fmt: skip
    letters = {"<|startoftext|>": 0, "<|endoftext|>": 1} | {f"{letter}</w>": 2 + i for i, letter in enumerate("abcdef")}
    return diffusers.StableDiffusionPipeline(
        vae=vae, unet=unet, text_encoder=small_clip(), tokenizer=transformers.CLIPTokenizer(vocab=letters, merges=[]),
        scheduler=diffusers.DDIMScheduler(), safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def test_exported_mixed_unet_runs_in_diffusers_as_the_readme_says(real_pipeline: Any, tmp_path: Path) -> None:
    import diffusers

    source, out = tmp_path / "source", tmp_path / "out"
    real_pipeline.unet.save_pretrained(source)
    assert engine("export", source, "--cast", "type:Linear=bf16", "-o", out) == 0
    assert '.from_pretrained("out").float()' in (out / "README.md").read_text()
    inputs = torch.ones(1, 4, 8, 8), torch.tensor([10]), torch.ones(1, 3, real_pipeline.unet.config.cross_attention_dim)
    with torch.no_grad():
        loaded = diffusers.UNet2DConditionModel.from_pretrained(out).float()(*inputs).sample
        for name, weight in real_pipeline.unet.named_parameters():
            linear = isinstance(real_pipeline.unet.get_submodule(name.rpartition(".")[0]), torch.nn.Linear)
            weight.copy_(weight.bfloat16() if linear else weight)
        assert torch.equal(real_pipeline.unet(*inputs).sample, loaded)


def test_diffusers_loads_an_exported_pipeline(real_pipeline: Any, tmp_path: Path) -> None:
    import diffusers

    source, out = tmp_path / "source", tmp_path / "out"
    real_pipeline.save_pretrained(source, max_shard_size="100KB")
    assert engine("export", source, "--cast", "*=bf16", "--cast", "vae=f16", "-o", out) == 0
    loaded = diffusers.DiffusionPipeline.from_pretrained(out, torch_dtype=torch.bfloat16)
    plain = diffusers.DiffusionPipeline.from_pretrained(out)
    assert type(loaded) is diffusers.StableDiffusionPipeline
    for part in ("unet", "vae", "text_encoder"):
        cast = torch.float16 if part == "vae" else torch.bfloat16
        before = getattr(real_pipeline, part).state_dict()
        for name, tensor in getattr(loaded, part).state_dict().items():
            assert torch.equal(tensor, before[name].to(cast).to(torch.bfloat16)), (part, name)
        for name, tensor in getattr(plain, part).state_dict().items():
            assert tensor.dtype == (torch.bfloat16 if part == "text_encoder" else torch.float32)
            assert torch.equal(tensor.float(), before[name].to(cast).float()), (part, name)
    unet = diffusers.UNet2DConditionModel.from_config(diffusers.UNet2DConditionModel.load_config(out / "unet"))
    kept = de.load_pretrained(out / "unet", module=unet)
    assert {parameter.dtype for parameter in kept.parameters()} == {torch.bfloat16}


def test_peft_loads_an_exported_adapter(make_llama: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = make_llama()
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(base), settings)
    model.save_pretrained(tmp_path / "lora")
    before = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    out = tmp_path / "out"
    assert engine("export", tmp_path / "lora", "--cast", "*=bf16", "-o", out) == 0
    for dtype, more, given in (
        (torch.float32, {}, torch.float32),
        (torch.bfloat16, {}, torch.float32),
        (torch.bfloat16, {"autocast_adapter_dtype": False}, torch.bfloat16),
    ):
        whole = transformers.LlamaForCausalLM.from_pretrained(base, dtype=dtype)
        loaded = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(whole, out, **more))
        assert loaded.keys() == before.keys()
        for name, tensor in before.items():
            assert loaded[name].dtype == given
            assert torch.equal(loaded[name].float(), tensor.bfloat16().float())


def test_app_exports_pipelines_and_adapters_in_their_layouts(pipeline: Path, adapter: Path, tmp_path: Path) -> None:
    from dtype_engine.checkpoint.source import locate
    from dtype_engine.core.options import RunSettings
    from dtype_engine.recipe import Recipe, Rule
    from dtype_engine.service.open_model import OpenModel
    from dtype_engine.service.save_requests import ExportRequest
    from dtype_engine.service.writer import SaveContext, plan_export, run_save

    recipe = Recipe().then(Rule.parse("*=bf16"))
    for folder, files, loader in ((pipeline, 2, "StableDiffusionPipeline"), (adapter, 1, "PeftModel")):
        source, out = locate(str(folder)), tmp_path / f"{folder.name}-app"
        context = SaveContext(OpenModel(source, de.Options(), source.open()), RunSettings(), recipe)
        planned = plan_export(context)
        assert planned.files == files
        assert f"{loader}.from_pretrained" in planned.loading
        sentence, _ = run_save(ExportRequest(out), context)
        assert sentence.startswith("exported to ")
        assert engine("export", folder, "--cast", "*=bf16", "-o", tmp_path / f"{folder.name}-cli") == 0
        assert files_in(out) == files_in(tmp_path / f"{folder.name}-cli")
