"""A model of which every layer takes as long as a file beside it says, and apps on real engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.helpers.recorded_worker import Way, make_engine
from tests.helpers.screen_text import until
from textual.pilot import Pilot

from dtype_engine import Options
from dtype_engine.checkpoint.source import locate
from dtype_tui.app import DtypeApp
from dtype_tui.state.launch import Launch

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


def app_on(way: Way, model: str, options: Options | None = None, **more: Any) -> DtypeApp:
    """As the command line opens it."""
    options = options or Options()
    source = locate(model, options.trust_pickle)
    tree, whole = source.peek()
    launch = Launch(source.title, tree, partial=not whole, **more)
    return DtypeApp(launch, lambda emit, _: make_engine(way, model, options, emit, read_headers=not whole))


@asynccontextmanager
async def opened(app: DtypeApp, size: tuple[int, int] = (120, 36)) -> AsyncIterator[Pilot[None]]:
    """The app with its model open, measured, and the engine at rest."""
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.controller.experiment.model.live and not app.controller.activity.busy)
        yield pilot
