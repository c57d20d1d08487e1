"""Parameters are what torch calls parameters: no buffers, and of packed weights the values that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.cli import cli
from dtype_engine.cli.program import run

IN, OUT, GROUP = 64, 96, 32
WORDS: dict[str, Any] = {"dtype": torch.int32}


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


def test_tied_weights_count_once_and_children_add_up(
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


def _text(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _compressed(**weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


PACKED = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
        {
            "qweight": torch.zeros(IN * 4 // 32, OUT, **WORDS), "qzeros": torch.zeros(IN // GROUP, OUT * 4 // 32, **WORDS),
            "scales": torch.zeros(IN // GROUP, OUT, dtype=torch.float16), "g_idx": torch.zeros(IN, **WORDS),
        },
    ),
    "gptq of 3 bits": (
        {"quant_method": "gptq", "bits": 3, "group_size": GROUP},
        {
            "qweight": torch.zeros(IN * 3 // 32, OUT, **WORDS), "qzeros": torch.zeros(IN // GROUP, OUT * 3 // 32, **WORDS),
            "scales": torch.zeros(IN // GROUP, OUT, dtype=torch.float16), "g_idx": torch.zeros(IN, **WORDS),
        },
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
        {
            "qweight": torch.zeros(IN, OUT * 4 // 32, **WORDS), "qzeros": torch.zeros(IN // GROUP, OUT * 4 // 32, **WORDS),
            "scales": torch.zeros(IN // GROUP, OUT, dtype=torch.float16),
        },
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {
            "weight": torch.zeros(IN * OUT // 2, 1, dtype=torch.uint8), "weight.absmax": torch.zeros(IN * OUT // 64),
            "weight.quant_map": torch.zeros(16),
            "weight.quant_state.bitsandbytes__nf4": _text({"blocksize": 64, "shape": [OUT, IN], "dtype": "bfloat16"}),
        },
    ),
    "bitsandbytes int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"weight": torch.zeros(OUT, IN, dtype=torch.int8), "SCB": torch.zeros(OUT)},
    ),
    "fp8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        {"weight": torch.zeros(OUT, IN).to(torch.float8_e4m3fn), "weight_scale_inv": torch.zeros(OUT // 32, IN // 32)},
    ),
    "compressed-tensors": (
        _compressed(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=True),
        {
            "weight_packed": torch.zeros(OUT, IN * 4 // 32, **WORDS), "weight_scale": torch.zeros(OUT, IN // GROUP),
            "weight_shape": torch.tensor([OUT, IN]),
        },
    ),
    "nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {
            "weight": torch.zeros(OUT, IN // 2, dtype=torch.uint8), "weight_scale_2": torch.zeros(()),
            "weight_scale": torch.zeros(OUT, IN // 16).to(torch.float8_e4m3fn),
        },
    ),
    "nvfp4 of compressed-tensors": (
        _compressed(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True),
        {
            "weight_packed": torch.zeros(OUT, IN // 2, dtype=torch.uint8), "weight_global_scale": torch.zeros(1),
            "weight_scale": torch.zeros(OUT, IN // 16).to(torch.float8_e4m3fn),
        },
    ),
    "modelopt awq, packed along the rows": (
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": GROUP},
        {
            "weight": torch.zeros(OUT // 2, IN, dtype=torch.uint8), "weight_scale": torch.zeros(OUT, IN // GROUP),
            "pre_quant_scale": torch.zeros(IN),
        },
    ),
    "DeepSeek-V4's experts": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"},
        {
            "weight": torch.zeros(OUT, IN // 2, dtype=torch.int8),
            "scale": torch.ones(OUT, IN // 32).to(torch.float8_e8m0fnu),
        },
    ),
    "gpt-oss": (
        {"quant_method": "mxfp4"},
        {
            "w_blocks": torch.zeros(1, OUT, IN // 32, 16, dtype=torch.uint8),
            "w_scales": torch.zeros(1, OUT, IN // 32, dtype=torch.uint8),
        },
    ),
    "hqq": (
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}},
        {
            "W_q": torch.zeros(IN * OUT // GROUP // 2, GROUP, dtype=torch.uint8), "nbits": torch.tensor(4, dtype=torch.int32),
            "scale": torch.zeros(IN * OUT // GROUP, 1), "zero": torch.zeros(IN * OUT // GROUP, 1),
            "shape": torch.tensor([OUT, IN]), "axis": torch.tensor(1, dtype=torch.int32),
            "packing": torch.frombuffer(bytearray(b"4bit_u8"), dtype=torch.uint8),
        },
    ),
    "torchao": (
        {"quant_method": "torchao"},
        {"_weight_qdata": torch.zeros(OUT, IN, dtype=torch.int8), "_weight_scale": torch.zeros(OUT, 1)},
    ),
    "quanto": (
        None,
        {
            "weight._data": torch.zeros(OUT, IN, dtype=torch.int8), "weight._scale": torch.zeros(OUT, 1),
            "input_scale": torch.ones(()),
        },
    ),
    "mlx": (
        {"bits": 4, "group_size": 32},
        {
            "weight": torch.zeros(OUT, IN * 4 // 32, dtype=torch.uint32), "scales": torch.zeros(OUT, IN // 32),
            "biases": torch.zeros(OUT, IN // 32),
        },
    ),
    "mlx, whose weight has bits of its own": (
        {"bits": 4, "group_size": 64, "layers.0": {"bits": 6, "group_size": 32}},
        {
            "weight": torch.zeros(OUT, IN * 6 // 32, dtype=torch.uint32), "scales": torch.zeros(OUT, IN // 32),
            "biases": torch.zeros(OUT, IN // 32),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("method", PACKED)
def test_packed_weight_counts_the_parameters_of_its_linear_layer(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linear, norm = nn.Linear(IN, OUT), nn.LayerNorm(IN)
    said, parts = PACKED[method]
    tensors = {f"layers.0.{name}": tensor for name, tensor in parts.items()} | {"layers.0.bias": linear.bias.detach()}
    tensors |= {f"norm.{name}": tensor for name, tensor in norm.state_dict().items()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if said is not None:
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    expected = sum(parameter.numel() for module in (linear, norm) for parameter in module.parameters())
    found = inspected(capsys, str(tmp_path))
    assert (found["parameters"], found["buffers"]) == (expected, 0)


def test_config_of_another_packing_counts_no_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = {"a.weight": torch.zeros(4, 8, dtype=torch.uint32), "a.scales": torch.zeros(4, 2)}
    safetensors.torch.save_file(words, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization": {"bits": 4, "group_size": 64}}))
    assert inspected(capsys, str(tmp_path))["parameters"] is None


def test_packed_words_without_config_count_as_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"a.weight_packed": torch.zeros(4, 4, **WORDS), "a.weight_scale": torch.zeros(4, 1), "b": torch.zeros(3)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    found = inspected(capsys, str(tmp_path / "x.safetensors"))
    assert found["parameters"] is None
    assert {row["name"]: row["parameters"] for row in found["modules"]} == {"": None, "a": None}
    assert run(cli, "dtype-engine", ["inspect", str(tmp_path / "x.safetensors")]) == 0
    said = capsys.readouterr().out
    assert "unknown" in said
    assert said.splitlines()[-1].endswith("whose packing is not known: 16 stored elements, first a.weight_packed")
    assert open_checkpoint(tmp_path / "x.safetensors").tree().totals()[""].parameters == 3
