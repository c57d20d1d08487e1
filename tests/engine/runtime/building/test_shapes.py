"""Checkpoints whose tensors have other shapes than their configuration: check and export name all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from tests.helpers import architectures
from tests.helpers.file_edits import change_config

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.cli import cli
from dtype_engine.cli.program import run

Config = dict[str, Any]


def differing(folder: Path) -> dict[str, tuple[list[int], list[int]]]:
    """Return the tensors whose shapes differ, by name: (shape in the files, shape in the module that transformers makes)."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        wanted = getattr(transformers, config.architectures[0])(config).state_dict()
    held = load_file(folder / "model.safetensors")
    return {
        name: (list(held[name].shape), list(wanted[name].shape))
        for name in held
        if name in wanted and held[name].shape != wanted[name].shape
    }


def checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = run(cli, "dtype-engine", ["check", str(folder), "--json"])
    return status, json.loads(capsys.readouterr().out)


def of_kind(report: dict[str, Any], kind: str) -> dict[str, str]:
    return {each["tensor"]: each["what"] for each in report["findings"] if each["kind"] == kind}


def saved(name: str, folder: Path) -> Path:
    module = architectures.make(name)[0]
    assert isinstance(module, transformers.PreTrainedModel)
    module.save_pretrained(folder)
    return folder


def change(folder: Path, tensors: dict[str, torch.Tensor | None] | None = None, **entries: Any) -> None:
    """Change tensors (None removes a tensor) and entries of config.json."""
    held = load_file(folder / "model.safetensors") | (tensors or {})
    kept = {name: value.contiguous() for name, value in held.items() if value is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, **entries)


WRONG: dict[str, tuple[str, Config]] = {
    "another vocabulary": ("llama", {"vocab_size": 66}),
    "another number of KV heads": ("llama", {"num_key_value_heads": 2}),
    "another size of the heads": ("llama", {"head_dim": 8}),
    "another size of the MLP": ("qwen3", {"intermediate_size": 52}),
    "another width, of an encoder": ("bert", {"intermediate_size": 40}),
    "another number of labels": ("vit", {"id2label": {str(place): str(place) for place in range(7)}}),
    "other patches": ("vit", {"patch_size": 4}),
    "another convolution kernel": ("mamba", {"conv_kernel": 3}),
    "other channels": ("resnet", {"num_channels": 1}),
    "other buckets": ("t5", {"relative_attention_num_buckets": 9}),
}


@pytest.mark.parametrize("kind", WRONG)
def test_check_names_every_tensor_of_the_wrong_shape(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, entries = WRONG[kind]
    folder = saved(name, tmp_path / "model")
    assert not differing(folder)
    assert checked(folder, capsys)[0] == 0
    change(folder, **entries)
    wanted = differing(folder)
    assert wanted
    status, report = checked(folder, capsys)
    found = of_kind(report, "tensor-shape")
    assert status == 1
    assert found.keys() == wanted.keys()
    for tensor, (stored, made) in wanted.items():
        assert found[tensor].startswith(f"is {stored} in the files, and {made} in the ")


def test_check_reports_other_findings_beside_a_wrong_shape(
    make_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama(tie_word_embeddings=False)
    up = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    turned: dict[str, torch.Tensor | None] = {"model.layers.0.mlp.up_proj.weight": up.t()}
    change(folder, turned | {"model.norm.weight": None, "model.extra.weight": torch.ones(2)})
    status, report = checked(folder, capsys)
    assert status == 1
    assert of_kind(report, "tensor-shape").keys() == differing(folder).keys() == {"model.layers.0.mlp.up_proj.weight"}
    assert of_kind(report, "missing-tensor").keys() == {"model.norm.weight"}
    assert of_kind(report, "unused-tensor").keys() == {"model.extra.weight"}
    export = ["export", str(folder), "--cast", "*=bf16", "-o", str(tmp_path / "out")]
    assert run(cli, "dtype-engine", export) == 2
    said = capsys.readouterr().err
    assert "model.norm.weight" in said
    assert "model.layers.0.mlp.up_proj.weight" in said
    assert not (tmp_path / "out").exists()
    assert run(cli, "dtype-engine", [*export, "--incomplete"]) == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    source = load_file(folder / "model.safetensors")
    assert written.keys() == source.keys()
    cast = [name for name in source if name != "model.extra.weight"]
    assert all(torch.equal(written[name], source[name].bfloat16()) for name in cast)


@pytest.mark.parametrize("biased", [0, 1])
def test_check_names_a_bias_of_the_wrong_length(
    biased: int, make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama(attention_bias=True)
    bias = f"model.layers.{biased}.self_attn.q_proj.bias"
    change(folder, {bias: torch.zeros(30)})
    assert of_kind(checked(folder, capsys)[1], "tensor-shape").keys() == differing(folder).keys() == {bias}


def test_check_names_a_tied_head_whose_shape_differs_from_the_embedding(
    make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama(tie_word_embeddings=True)
    change(folder, {"lm_head.weight": torch.zeros(70, 32)})
    found = of_kind(checked(folder, capsys)[1], "tensor-shape")
    assert found == {"lm_head.weight": "is [70, 32] in the files, and [64, 32] in the LlamaForCausalLM of config.json"}
    assert run(cli, "dtype-engine", ["inspect", str(folder), "--cast", "type:Linear=bf16", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "lm_head.weight: it is [64, 32] there, and [70, 32] in the files" in " ".join(shown["incomplete"])
    assert {each["name"]: each["shape"] for each in shown["tensors"]}["lm_head.weight"] == [70, 32]


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_check_names_experts_of_the_wrong_number_or_size(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(name, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    size = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    packed = [each for each, _ in module.named_parameters() if ".experts." in each]
    change(folder, **{key: config[key] + 1})
    status, report = checked(folder, capsys)
    found = of_kind(report, "tensor-shape")
    assert status == 1
    assert set(packed) <= found.keys()
    routers = {each for each in load_file(folder / "model.safetensors") if each.endswith(".gate.weight")}
    assert found.keys() - set(packed) == routers
    change(folder, **{key: config[key], size: config[size] + 2})
    experts = {each for each in load_file(folder / "model.safetensors") if ".experts." in each}
    found = of_kind(checked(folder, capsys)[1], "tensor-shape")
    assert found.keys() - differing(folder).keys() == experts
    change(folder, **{size: config[size]})
    lost = sorted(experts)[-1]
    change(folder, {lost: None})
    assert of_kind(checked(folder, capsys)[1], "tensor-shape"), "an expert that lacks a matrix"


def test_check_reports_a_config_from_which_no_model_can_be_made(
    make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama()
    for entries in (
        {"num_attention_heads": 3, "head_dim": None},
        {"num_hidden_layers": 10**9},
        {"hidden_act": "nothing"},
    ):
        before = (folder / "config.json").read_text()
        change(folder, **entries)
        if "num_hidden_layers" not in entries:  # transformers itself would take all memory for these
            with pytest.raises((StrictDataclassError, KeyError)):
                transformers.AutoModelForCausalLM.from_pretrained(folder)
        status, report = checked(folder, capsys)
        assert status == 1
        assert of_kind(report, "configuration").keys() == {"config.json"}
        (folder / "config.json").write_text(before)


@pytest.mark.parametrize("architecture", ["NothingForCausalLM", None])
def test_check_says_that_shapes_of_an_unknown_architecture_are_unchecked(
    architecture: str | None, make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama()
    if architecture is None:
        (folder / "config.json").unlink()
    else:
        change(folder, architectures=[architecture], model_type="nothing")
    status, report = checked(folder, capsys)
    (said,) = [each for each in report["unchecked"] if each.startswith("the architecture")]
    assert ("there is no config.json" if architecture is None else architecture) in said
    assert (status, report["findings"]) == (0, [])


def test_check_names_quantized_weights_of_the_wrong_shape(
    make_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama(intermediate_size=64, tie_word_embeddings=False)
    out = tmp_path / "fp8"
    assert run(cli, "dtype-engine", ["export", str(folder), "--cast", "*.mlp=fp8", "-o", str(out)]) == 0
    capsys.readouterr()
    assert checked(out, capsys)[0] == 0
    change_config(out, intermediate_size=80)
    shapes = open_checkpoint(out).weights
    found = of_kind(checked(out, capsys)[1], "tensor-shape")
    assert found.keys() == {name for name in shapes if ".mlp." in name}
    change_config(folder, intermediate_size=80)
    assert found.keys() == differing(folder).keys()
