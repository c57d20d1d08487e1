"""Notices and packed parameters of pickles, as `torch.save` writes them: what inspect, check, weights and export say of them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtype_engine.cli import cli, run


def engine(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = run(cli, "dtype-engine", [str(argument) for argument in arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()


@pytest.fixture
def dynamic(tmp_path: Path) -> Path:
    torch.backends.quantized.engine = next(  # type: ignore[assignment]
        name for name in ("x86", "fbgemm", "onednn", "qnnpack") if name in torch.backends.quantized.supported_engines
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.ao.quantization.quantize_dynamic(net(), {nn.Linear}, dtype=torch.qint8)
        torch.save(made.state_dict(), tmp_path / "dynamic.pth")
    return tmp_path / "dynamic.pth"


def test_packed_parameters_of_torch_open_as_weight_and_bias(dynamic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = engine(capsys, "inspect", dynamic, "--json")
    assert status == 0
    shapes = {each["name"]: each["shape"] for each in json.loads(out)["tensors"]}
    right = {name: list(tensor.shape) for name, tensor in net().state_dict().items()}
    assert {name: shapes[name] for name in right} == right
    (notice,) = json.loads(out)["notices"]
    assert notice == f"dynamic.pth: 2 tensors can't be cast and exported, first 0.weight: {BY_TORCH}"


BY_TORCH = "is quantized by torch (qint8), with a scale of its own kind"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["dynamic", "static", "tensor", "float16"])
def test_layers_quantized_by_torch_are_counted_and_explained_alike(
    how: str, dynamic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"{how}.pth"
    if how == "static":
        wrapped = torch.ao.quantization.QuantWrapper(net())
        wrapped.qconfig = torch.ao.quantization.default_qconfig  # type: ignore[assignment]
        prepared = torch.ao.quantization.prepare(wrapped)
        prepared(torch.randn(4, 16))
        torch.save(torch.ao.quantization.convert(prepared).state_dict(), path)
    if how == "tensor":
        values = net().state_dict()
        quantized = {
            name: torch.quantize_per_tensor(values[name], 0.01, 0, torch.qint8) for name in ("0.weight", "2.weight")
        }
        torch.save(values | quantized, path)
    if how == "float16":
        made = torch.ao.quantization.quantize_dynamic(net(), {nn.Linear}, dtype=torch.float16)
        torch.save(made.state_dict(), path)
    _, out, _ = engine(capsys, "inspect", path, "--json")
    assert json.loads(out)["parameters"] == sum(parameter.numel() for parameter in net().parameters())
    _, out, _ = engine(capsys, "weights", path, "--cast", "*=bf16")
    assert "scale" not in out.partition("left out")[0]
    if how == "float16":
        return
    prefix = "module." if how == "static" else ""
    assert "quantized by torch" in out.partition("left out")[2]
    for command in (("inspect", path), ("check", path), ("weights", path, "--cast", "*=bf16")):
        _, _, err = engine(capsys, *command)
        assert f"note: {path.name}: 2 tensors can't be cast and exported, first {prefix}0.weight: {BY_TORCH}" in err


@pytest.mark.parametrize("target", ["out", "out.pth"])
@pytest.mark.parametrize("rules", [(), ("--cast", "*=bf16")])
def test_packed_parameters_are_not_exported(
    dynamic: Path, target: str, rules: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = engine(capsys, "export", dynamic, *rules, "-o", dynamic.with_name(target))
    assert status == 2
    assert "0.weight (and 1 more) is quantized by torch (qint8)" in err
    assert [file.name for file in dynamic.parent.iterdir()] == ["dynamic.pth"]


def test_weights_command_names_skipped_packed_parameters(dynamic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = engine(capsys, "weights", dynamic, "--cast", "*=bf16", "--json")
    assert status == 0
    skipped = {each["name"]: each["why"] for each in json.loads(out)["skipped"]}
    assert all("quantized by torch (qint8)" in skipped[name] for name in ("0.weight", "2.weight"))


def test_packed_embedding_without_a_bias_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight = torch.quantize_per_tensor(torch.randn(4, 8), 0.1, 0, torch.qint8)
    torch.save({"a._packed_params._packed_params": (weight, None), "b.weight": torch.ones(3)}, tmp_path / "x.pth")
    _, out, _ = engine(capsys, "inspect", tmp_path / "x.pth", "--json")
    assert {each["name"]: each["shape"] for each in json.loads(out)["tensors"]} == {"a.weight": [4, 8], "b.weight": [3]}


_NESTED: dict[str, tuple[Any, str]] = {
    "generator": ({"generator": net().state_dict(), "epoch": 3}, "the weights are its entry 'generator'"),
    "model and model_ema": (
        {"model": net().state_dict(), "model_ema": net().state_dict()},
        "4 other tensors in it are not among the weights, first model_ema.0.weight",
    ),
    "averages beside the weights": (
        {
            f"{prefix}.{name}": tensor
            for prefix in ("model", "model_ema")
            for name, tensor in net().state_dict().items()
        },
        "the tensors under model_ema have the shapes of others in the file",
    ),
}


@pytest.mark.parametrize("kind", list(_NESTED))
def test_every_command_shows_the_notices_about_a_pickle(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held, says = _NESTED[kind]
    path = tmp_path / "x.pth"
    torch.save(held, path)
    torch.save(net().state_dict(), tmp_path / "plain.pth")
    for arguments in (("inspect", path), ("check", path), ("weights", path, "--cast", "*=bf16"),
                      ("weights", tmp_path / "plain.pth", "--against", path)):  # fmt: skip
        _, _, err = engine(capsys, *arguments)
        assert f"note: x.pth: {says}" in err, arguments
    _, out, _ = engine(capsys, "inspect", path, "--json")
    assert any(says in notice for notice in json.loads(out)["notices"])
