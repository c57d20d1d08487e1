"""A small convolutional network of the user's own: the model of a Python file, and what lone checkpoints hold."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    """Convolution, batch norm (buffers, one of them an integer), two linear layers: pictures [B, 1, 8, 8] to scores [B, 5]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.hidden = nn.Linear(4 * 8 * 8, 24)
        self.out = nn.Linear(24, 5)
        self.bn.running_mean.uniform_(-0.5, 0.5)
        self.bn.running_var.uniform_(0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn(self.conv(x))).flatten(1)
        scores: torch.Tensor = self.out(torch.relu(self.hidden(x)))
        return scores


def make() -> Net:
    """The same network from a function."""
    return Net()


def compiled() -> Net:
    """The same network, a layer of which is compiled."""
    made = Net()
    made.hidden.compile(backend="eager")  # otherwise torch imports its compiler, which no part of this runs
    return made


def example_inputs() -> tuple[torch.Tensor, ...]:
    """What it is run on."""
    return (torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0)),)
