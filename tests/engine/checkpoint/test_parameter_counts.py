"""Parameters are counted as by torch: buffers are not counted, and packed weights count with their unpacked values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from tests.helpers.quantized import CASES
from torch import nn

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.cli import cli
from dtype_engine.cli.program import run


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run(cli, "dtype-engine", ["inspect", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.register_buffer("mean", torch.zeros(5))


def test_buffers_are_counted_apart_from_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = Net()
    parameters = sum(parameter.numel() for parameter in net.parameters())
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.conv = nn.Conv2d(3, 8, 3)\n        self.norm = nn.BatchNorm2d(8)\n"
        "        self.register_buffer('mean', torch.zeros(5))\n"
    )
    live = inspected(capsys, f"{tmp_path / 'net.py'}:Net")
    assert (live["parameters"], live["buffers"]) == (parameters, sum(buffer.numel() for buffer in net.buffers()))
    del net.mean  # of a file alone only the statistics of normalisation layers are known as buffers
    safetensors.torch.save_file(net.state_dict(), tmp_path / "net.safetensors")
    alone = inspected(capsys, str(tmp_path / "net.safetensors"))
    assert (alone["parameters"], alone["buffers"]) == (parameters, sum(buffer.numel() for buffer in net.buffers()))
    assert sum(row["parameters"] for row in alone["modules"] if row["name"] in ("conv", "norm")) == parameters


def test_tied_weights_are_counted_once_in_parameters_and_bytes(
    make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama()
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = sum(parameter.numel() for parameter in module.parameters())
    found = inspected(capsys, str(folder), "--cast", "*=bf16")
    rows = {row["name"]: row for row in found["modules"]}
    assert found["parameters"] == expected == rows["model"]["parameters"]
    assert rows["lm_head"]["parameters"] == rows["lm_head"]["bytes"] == 0
    assert sum(row["bytes"] for name, row in rows.items() if name in ("model", "lm_head")) == rows[""]["bytes"]
    assert run(cli, "dtype-engine", ["inspect", str(folder), "--cast", "*=bf16"]) == 0
    assert "weight = model.embed_tokens.weight" in capsys.readouterr().out


@pytest.mark.parametrize("name", CASES)
def test_packed_weight_counts_as_its_unpacked_parameters(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, norm = CASES[name](), nn.LayerNorm(64)
    case.tensors |= {f"norm.{local}": tensor for local, tensor in norm.state_dict().items()}
    found = inspected(capsys, str(case.save(tmp_path)))
    assert (found["parameters"], found["buffers"]) == (sum(right.size for right in case.right.values()) + 128, 0)


def test_parameter_count_is_unknown_if_the_config_does_not_fit_the_packing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"a.weight": torch.zeros(4, 8, dtype=torch.uint32), "a.scales": torch.zeros(4, 2)}
    safetensors.torch.save_file(words, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization": {"bits": 4, "group_size": 64}}))
    assert inspected(capsys, str(tmp_path))["parameters"] is None


def test_parameter_count_of_packed_words_without_a_config_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {
        "a.weight_packed": torch.zeros(4, 4, dtype=torch.int32),
        "a.weight_scale": torch.zeros(4, 1),
        "b": torch.zeros(3),
    }
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    found = inspected(capsys, str(tmp_path / "x.safetensors"))
    assert found["parameters"] is None
    assert {row["name"]: row["parameters"] for row in found["modules"]} == {"": None, "a": None}
    assert run(cli, "dtype-engine", ["inspect", str(tmp_path / "x.safetensors")]) == 0
    said = capsys.readouterr().out
    assert "unknown" in said
    assert said.splitlines()[-1].endswith("whose packing is not known: 16 stored elements, first a.weight_packed")
    assert open_checkpoint(tmp_path / "x.safetensors").tree().totals()[""].parameters == 3
