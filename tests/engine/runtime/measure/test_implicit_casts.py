from __future__ import annotations

import json

import pytest
import torch
from tests.helpers.paths import TINYNET
from torch import nn

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.second(hidden) + self.second(hidden) * x.sum()


def test_implicit_casts_are_listed_with_module_operation_and_size() -> None:
    session = de.open(Net(), inputs=(torch.ones(5, 4),))
    assert session.flow() == ()
    session.cast("second", "float64")
    first, *rest = session.flow()
    assert (first.module, first.operation, first.source, first.target) == ("second", "linear", "float32", "float64")
    assert (first.elements, first.count, first.torch_raises) == (2 * 15, 2, True)
    assert rest == []


def test_casts_to_float64_come_first() -> None:
    session = de.open(Net(), inputs=(torch.ones(50, 4),))
    session.cast("first", "bfloat16")
    session.cast("second", "float64")
    assert session.flow()[0].target == "float64"
    assert {(cast.module, cast.target) for cast in session.flow()} == {("second", "float64"), ("first", "bfloat16")}


def test_implicit_casts_of_alike_layers_are_listed_in_execution_order() -> None:
    layers = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(12)))
    session = de.open(layers, inputs=(torch.ones(5, 3),))
    session.cast("{0,2,4,6,8,10}", "bfloat16")
    assert [cast.module for cast in session.flow()] == [str(each) for each in range(12)]


def test_flow_command_lists_implicit_casts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "dtype-engine", ["flow", "--cast", "*.mlp=bf16", "--json"]) == 0
    casts = json.loads(capsys.readouterr().out)["casts"]
    assert {cast["operation"] for cast in casts} >= {"linear"}
    assert {cast["module"].rpartition(".")[2] for cast in casts} <= {"gate_proj", "up_proj", "down_proj", "mlp"} | {
        cast["module"].rpartition(".")[2] for cast in casts if not cast["torch_raises"]
    }
    assert run(cli, "dtype-engine", ["flow", "--cast", "*.mlp=bf16"]) == 0
    text = capsys.readouterr().out
    assert "f32 → bf16" in text
    assert "raises" in text
    tinynet = f"{TINYNET}:TinyNet"
    assert run(cli, "dtype-engine", ["flow", tinynet]) == 0
    assert "no implicit casts" in capsys.readouterr().out
