"""Planted outliers beyond float16: the module is named, and the proposed rule mends it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers import architectures
from torch import nn

import dtype_engine as de
from dtype_engine.reports.text_drift import nonfinite_lines
from dtype_engine.results.attribution import NonFiniteDiagnosis

MLP = "model.layers.1.mlp"


def planted(plant: Callable[[nn.Module], None], dtype: str = "float16", **settings: Any) -> tuple[Any, Any]:
    """A session on a small Llama with something planted in it, all of it cast, and what is found."""
    module, inputs = architectures.make("llama")
    with torch.no_grad():
        plant(module)
    session = de.open(module, inputs=inputs)
    session.settings = de.RunSettings(**settings)
    session.cast("*", dtype)
    report = session.drift()
    return session, session.nonfinite(report)


def mended(session: Any, found: NonFiniteDiagnosis) -> bool:
    assert found.remedy is not None
    assert session.drift().output.nonfinite  # trials left the recipe in force
    session.cast(*found.remedy.rsplit("=", 1))
    return session.drift().output.nonfinite == 0


def large_weight(module: Any) -> None:
    module.model.layers[1].mlp.up_proj.weight[3, 4] = 1e5


def test_a_weight_beyond_float16() -> None:
    session, found = planted(large_weight)
    assert (found.kind, found.first_module, found.module) == ("weight", f"{MLP}.up_proj", f"{MLP}.up_proj")
    assert found.weights == (f"{MLP}.up_proj.weight",)
    assert (found.dtype, found.limit, found.operation) == ("float16", 65504.0, "linear")
    assert found.largest == 1e5
    assert found.remedy == f"{MLP}.up_proj.weight=bfloat16"
    assert mended(session, found)


def test_activations_beyond_float16_of_one_module() -> None:
    def plant(module: Any) -> None:
        mlp = module.model.layers[1].mlp
        mlp.up_proj.weight.mul_(3e4)
        mlp.gate_proj.weight.mul_(1e2)
        mlp.down_proj.weight.mul_(1e-6)

    session, found = planted(plant)
    assert (found.kind, found.module, found.operation) == ("activation", MLP, "mul")
    heard: list[torch.Tensor] = []
    module, inputs = architectures.make("llama")
    with torch.no_grad():
        plant(module)
        module.get_submodule(f"{MLP}.down_proj").register_forward_pre_hook(lambda m, args: heard.append(args[0]))
        module(**inputs)
    assert found.largest_reference == pytest.approx(float(heard[0].abs().max()), rel=1e-6)
    assert found.largest < 65504 < found.largest_reference
    assert found.remedy == f"{MLP}=bfloat16"
    assert mended(session, found)


def test_activations_that_stay_large_need_all_layers_after() -> None:
    def plant(module: Any) -> None:
        module.model.layers[0].mlp.down_proj.weight.mul_(2e6)

    session, found = planted(plant)
    assert found.module.startswith("model.layers.0")
    assert mended(session, found)


def test_a_linear_that_overflows_by_itself() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.large, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.last(torch.tanh(self.large(self.first(x)))))

    net = Net()
    with torch.no_grad():
        net.large.weight.fill_(6e4)
        net.first.bias.fill_(10)
    session = de.open(net, inputs=(torch.ones(2, 8),))
    session.cast("*", "float16")
    report = session.drift()
    # tanh brings infinity back to 1: a large value that is lost on the way harms nothing here.
    assert session.nonfinite(report) is None or report.output.nonfinite


def test_a_mask_of_minus_infinity_is_not_blamed() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.query(x) @ x.transpose(-1, -2)
            mask = torch.full_like(scores, -math.inf).triu(1)
            lowest = torch.full_like(scores, torch.finfo(scores.dtype).min).triu(1)
            return torch.as_tensor((scores + mask + lowest).softmax(-1) @ self.value(x))

    net = Masked()
    with torch.no_grad():
        net.value.weight[0, 0] = 7e4
    session = de.open(net, inputs=(torch.randn(1, 4, 8),))
    session.cast("*", "float16")
    found = session.nonfinite(session.drift())
    assert (found.kind, found.module, found.weights) == ("weight", "value", ("value.weight",))
    assert mended(session, found)


def test_the_reference_itself_is_not_finite() -> None:
    def plant(module: Any) -> None:
        module.model.layers[1].mlp.up_proj.weight[3, 4] = math.nan

    _, found = planted(plant)
    assert (found.kind, found.remedy) == ("reference", None)
    assert found.first_module == f"{MLP}.up_proj"
    assert found.weights == (f"{MLP}.up_proj.weight",)
    assert "no dtype mends it" in found.reason


def test_a_reference_that_overflows_float32_itself() -> None:
    def plant(module: Any) -> None:
        module.model.layers[0].mlp.up_proj.weight.mul_(1e30)
        module.model.layers[0].mlp.down_proj.weight.mul_(1e30)

    _, found = planted(plant, "bfloat16")
    assert (found.kind, found.remedy) == ("reference", None)
    assert found.module.startswith("model.layers.0.mlp")


def test_autocast_overflows_whatever_the_rules_say() -> None:
    def plant(module: Any) -> None:
        module.model.layers[1].mlp.up_proj.weight.mul_(1e7)

    _, found = planted(plant, "float32", autocast="float16")
    assert found.remedy is None
    assert "turn it off" in found.reason


def test_a_finite_output_has_nothing_to_find() -> None:
    _, found = planted(lambda module: None)
    assert found is None


class Squares(nn.Module):
    """Overflows float16 between its two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            self.a.weight.mul_(4000)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.a(x)
        return self.b(y * y)


def test_an_operation_of_the_models_own_code_is_not_said_to_be_a_modules() -> None:
    torch.manual_seed(0)
    session = de.open(Squares(), inputs=torch.linspace(-1, 1, 32).reshape(4, 8))
    session.cast("*", "float16")
    found = session.nonfinite(session.drift())
    assert found is not None
    assert (found.module, found.operation, found.first_module) == ("", "mul", "b")
    assert nonfinite_lines(found)[0] == "not finite first in the model itself: mul in float16"


class OverflowsAnyway(Squares):
    """One of its outputs is beyond float32 too."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y * torch.tensor([math.inf] + [1.0] * 7, dtype=y.dtype)


def test_a_remedy_makes_finite_what_the_reference_has_finite() -> None:
    torch.manual_seed(0)
    session = de.open(OverflowsAnyway(), inputs=torch.linspace(0.5, 1, 32).reshape(4, 8))
    session.cast("*", "float16")
    found = session.nonfinite(session.drift())
    assert found is not None
    assert found.remedy is not None
    assert nonfinite_lines(found)[-1].endswith("tried, the output is finite with it where the reference is")
