"""Calls that a `TorchFunctionMode` does not see, or whose effect it can't see, against plain torch with values made by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import dtype_engine as de


def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * gate)


class Scripted(nn.Module):
    """Gives a weight to a function that TorchScript runs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(8))
        self.function = torch.jit.script(gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function(x, self.gate)
        return result


class Mapped(nn.Module):
    """Calls a module inside of `torch.vmap`, and writes in place there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def row(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x).clone()
        y *= 2
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(self.row)(x)


class Renormed(nn.Module):
    """Looks up rows that are brought to a norm first, in the table itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(9, 8, max_norm=1.0)
        self.many = nn.EmbeddingBag(9, 8, max_norm=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x.argsort().long()
        rows: torch.Tensor = self.one(ids).sum(1).float()
        return rows + self.many(ids).float()


class AsksForType(nn.Module):
    """Asks torch what a weight and integers are promoted to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.linear.weight.to(torch.result_type(self.linear.weight, x.argsort())))


def int8(tensor: torch.Tensor) -> torch.Tensor:
    """A weight's values in int8 with one scale a row, as a Python loop; one for all of a vector."""
    rows = tensor if tensor.ndim == 2 else tensor[None]
    scales = [float(row.abs().max()) / 127 for row in rows]
    kept = torch.stack([(row / scale).round() * scale for row, scale in zip(rows, scales, strict=True)])
    return kept.reshape(tensor.shape)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("kind", [Scripted, Mapped, Renormed, AsksForType])
def test_a_call_that_is_hidden_from_a_mode_is_what_plain_torch_runs(kind: type[nn.Module]) -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))

    def made(cast: str = "float32") -> nn.Module:
        torch.manual_seed(0)
        module = kind().requires_grad_(False)
        for parameter in module.parameters():
            parameter.data = int8(parameter.data) if cast == "int8" else parameter.data.to(getattr(torch, cast))
        return module

    session = de.open(made(), inputs=(x,))
    reference = made()(x).double()
    for dtype in ("int8", "float16", "int8", "float32"):
        session.cast("*", dtype)
        try:
            expected = made(dtype)(x).double() - reference
        except RuntimeError:  # plain torch refuses float32 rows and float16 weights
            continue
        output = session.drift().output
        assert output.max_abs == pytest.approx(float(expected.abs().max()), abs=1e-6)
        assert output.mean_abs == pytest.approx(float(expected.abs().mean()), abs=1e-6)
        assert (dtype == "float32") == (output.max_abs == 0)
    for name, tensor in session.model.module.state_dict().items():
        assert torch.equal(tensor, made().state_dict()[name]), "a measurement writes to no weight"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_an_estimated_scan_sees_what_torchscript_runs() -> None:
    torch.manual_seed(0)
    session = de.open(Scripted(), inputs=(torch.randn(5, 8),))
    exact = session.scan(["int8"], exact=True).scores()["gate", "int8"]
    assert session.scan(["int8"], draws=300).scores()["gate", "int8"] == pytest.approx(exact, rel=0.3)
