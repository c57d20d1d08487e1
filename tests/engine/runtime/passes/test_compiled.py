"""A model with compiled parts is measured as the same model without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import dtype_engine as de
from dtype_engine.results.drift import DriftReport


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(16, 64), nn.Linear(64, 10)
        self.blocks = nn.ModuleList([Block(64) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def child() -> nn.Module:
    net = Net()
    net.blocks[1] = torch.compile(net.blocks[1], backend="eager")  # type: ignore[assignment]
    return net


def in_place() -> nn.Module:
    net = Net()
    net.blocks[1].compile(backend="eager")
    return net


def whole() -> nn.Module:
    return torch.compile(Net(), backend="eager")  # type: ignore[return-value]


def drift(module: nn.Module, pattern: str) -> DriftReport:
    session = de.open(module, inputs=(torch.randn(8, 16, generator=torch.Generator().manual_seed(1)),))
    session.cast(pattern, "bfloat16")
    return session.drift()


@pytest.mark.parametrize("pattern", ["*", "*blocks.1.*"])
@pytest.mark.parametrize(("made", "where"), [(child, "blocks.1"), (in_place, "blocks.1"), (whole, "the model")])
def test_drift_of_a_model_with_compiled_parts_equals_that_without(
    made: Callable[[], nn.Module], where: str, pattern: str
) -> None:
    plain, compiled = drift(Net(), pattern), drift(made(), pattern)
    assert compiled.output == plain.output
    assert 0 < plain.output.rel_l2 < 0.1
    modules = {module.name.replace("_orig_mod.", ""): module.sqnr_db for module in compiled.modules}
    assert {module.name: modules[module.name] for module in plain.modules} == {m.name: m.sqnr_db for m in plain.modules}
    assert any(notice.startswith(f"compiled by torch.compile: {where}") for notice in compiled.notices)
    assert not plain.notices
