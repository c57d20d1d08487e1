"""A recipe has one meaning: every command plans the same bytes, and those are the bytes of the exported files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from tests.helpers import checkpoint_folders
from tests.helpers.file_edits import Tensors, change_config, change_tensors

from dtype_engine.cli import cli
from dtype_engine.cli.program import run

RECIPES = {
    "nothing": [],
    "classes": ["--cast", "*=bf16", "--cast", "type:Linear=f16"],
    "tied name": ["--cast", "*embed*=bf16", "--cast", "{head}=f16"],
    "several": ["--cast", "*=f16", "--cast", "*.0.*=f32", "--cast", "type:*Norm=f32", "--cast", "re:.*[.]weight=bf16"],
    "preset": ["--preset", "{preset}", "--cast", "type:Embedding=int8"],
}

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.lm_head = nn.Linear(8, 16, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x.flatten(0, 1)))


def example_inputs():
    return torch.arange(8).reshape(1, 8)
"""


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    status = run(cli, "dtype-engine", arguments)
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return json.loads(captured.out)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(cli, "dtype-engine", arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def bytes_in(folder: Path) -> int:
    """By safetensors' own reader."""
    return sum(
        tensor.nbytes for file in folder.glob("*.safetensors") for tensor in safetensors.torch.load_file(file).values()
    )


def as_a_pickle(folder: Path) -> None:
    """Replace the weights by a pickle of a tied model, with both names for one storage."""
    module = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    torch.save(module.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


CHANGES: dict[str, Callable[[Tensors], object]] = {
    "mixed": lambda tensors: tensors.update(
        {name: tensor.half() if "mlp" in name else tensor.bfloat16() for name, tensor in tensors.items()}
    ),
    "more tensors": lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.ones(8, 8)}),
    "stored twice": lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
}


def models(make_llama: Callable[..., Path], tmp_path: Path, name: str) -> str:
    if name in ("t5", "blip", "bert", "mixtral"):
        return str(checkpoint_folders.save(name, tmp_path / name, processed=False))
    if name == "python file":
        (tmp_path / "net.py").write_text(NET)
        return f"{tmp_path / 'net.py'}:Net"
    if name == "bf16 llama":
        return str(make_llama(dtype="bfloat16", tie_word_embeddings=False))
    folder = make_llama(tie_word_embeddings=name != "base model")
    if name == "pickle":
        as_a_pickle(folder)
    elif name == "base model":  # its class over the files of one with a head: other names, and a tensor without a place
        change_config(folder, architectures=["LlamaModel"])
    elif name != "tied llama":
        change_tensors(folder, CHANGES[name])
    return str(folder)


PLANNED = {
    "tied llama": ("classes", "tied name"),
    "bf16 llama": ("nothing", "several"),
    "t5": ("tied name", "preset"),
    "blip": ("nothing", "tied name"),
    "bert": ("classes", "preset"),
    "mixtral": ("several", "preset"),
    "mixed": ("nothing", "several"),
    "pickle": ("tied name", "several"),
    "python file": ("tied name", "several"),
    "more tensors": ("nothing", "preset"),
    "stored twice": ("nothing", "tied name"),
    "base model": ("classes", "several"),
}
"""Two of the recipes for each model."""


@pytest.mark.parametrize("name", PLANNED)
def test_every_command_plans_as_many_bytes_as_export_writes(
    name: str, make_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = models(make_llama, tmp_path, name)
    preset = "norms-head-fp32" if name == "mixtral" else "fp8-linears"  # scales of packed experts: see test_experts.py
    head = {"bert": "*decoder.weight", "blip": "*predictions.decoder", "python file": "lm_head"}.get(name, "lm_head")
    for what in PLANNED[name]:
        rules = [text.replace("{head}", head).replace("{preset}", preset) for text in RECIPES[what]]
        if what == "several" and name == "python file":
            rules = ["--cast", "*=f16", "--cast", "layers.0=f32"]
        inspected = answer(capsys, "inspect", model, *rules, "--json")
        drift = answer(capsys, "drift", model, *rules, "--json")
        out = tmp_path / what
        written = answer(capsys, "export", model, *rules, "-o", str(out), "--json")
        stored_once = what != "nothing" or name != "stored twice"
        assert drift["memory"]["planned_bytes"] == bytes_in(out) == written["nbytes"], what
        if stored_once:  # headers alone tell what the files hold
            assert inspected["planned_bytes"] == bytes_in(out), what
            assert inspected["stored_bytes"] == drift["memory"]["stored_bytes"], what
    assert answer(capsys, "verify", str(out), "--against", model, "--json")["same"]
