"""A model of which every layer takes as long as a file beside it says, and the app on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from textual.pilot import Pilot

from dtype_tui.app import DtypeApp

from .screen_text import until

LAYERS = 12
# A model whose every layer takes as long as a file beside it says, so that a pass lasts as long as a test needs.
CODE = f"""
import time
from pathlib import Path
import torch
from torch import nn

SECONDS = Path(__file__).with_name("seconds")

class Layer(nn.Linear):
    def forward(self, x):
        begun = time.monotonic()
        while time.monotonic() - begun < float(SECONDS.read_text()):
            time.sleep(0.005)
        return super().forward(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(64, 64) for _ in range({LAYERS}))
        self.norm = nn.BatchNorm1d(64)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.norm(x)

def make():
    return Net()
"""


def slow(net: Path, seconds: float = 0.15) -> None:
    """Let each layer take so long, and so the one that is running."""
    whole = net.with_name("seconds.new")
    whole.write_text(str(seconds))
    whole.replace(net.with_name("seconds"))


@asynccontextmanager
async def opened(app: DtypeApp, size: tuple[int, int] = (120, 36)) -> AsyncIterator[Pilot[None]]:
    """The app with its model open, measured, and the engine at rest."""
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.controller.experiment.model.live and not app.controller.activity.busy)
        yield pilot
