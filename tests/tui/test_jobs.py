"""What people open the app for, by the keys that they press: each job in a few keys from the first paint, with what came of it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.helpers.screen_text import lines, screen, until
from tests.helpers.slow_net import app_on
from textual.pilot import Pilot

from dtype_engine import Options
from dtype_engine.checkpoint.source import DEMO
from dtype_tui.app import DtypeApp
from dtype_tui.screens.optimise import OptimiseScreen

pytestmark = pytest.mark.slow
MOST_KEYS = 12
WEIGHTS = DEMO / "model.safetensors"


class Keys:
    """Presses keys, and counts them. A typed character is a key."""

    def __init__(self, app: DtypeApp, pilot: Pilot[None]) -> None:
        self.app, self._pilot = app, pilot
        self.pressed = 0

    async def press(self, *keys: str) -> None:
        self.pressed += len(keys)
        await self._pilot.press(*keys)

    async def until(self, condition: Callable[[], object]) -> None:
        await until(self._pilot, condition)

    async def measured(self) -> float:
        """Wait until the recipe is measured and nothing runs. Returns the mean KL."""
        controller = self.app.controller
        await self.until(lambda: controller.experiment.results.report is not None and not controller.activity.busy)
        report = controller.experiment.results.report
        assert report is not None
        assert report.output.kl_mean is not None
        return report.output.kl_mean


@asynccontextmanager
async def job() -> AsyncIterator[Keys]:
    """Yield the app on the demo with one short text, from its first paint. In the end, no more keys than `MOST_KEYS` may have been
    pressed.
    """
    options = Options(prompts=("The keeper of the lighthouse counted the ships.",), device="cpu")
    app = app_on("thread", "demo", options)
    async with app.run_test(size=(120, 36)) as pilot:
        keys = Keys(app, pilot)
        yield keys
        assert 0 < keys.pressed <= MOST_KEYS
        # Two engines in one process must not import transformers at the same time.
        await keys.until(lambda: app.controller.experiment.model.live or app.return_code is not None)


def bytes_below(name: str) -> int:
    """Return the bytes of the tensors below a module, read from the file."""
    with safe_open(WEIGHTS, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return sum(tensor.nbytes for key, tensor in tensors.items() if key.startswith(f"{name}."))


async def test_user_can_find_the_largest_module_in_a_few_keys() -> None:
    async with job() as keys:
        await keys.press("z", "down", "down")
        tree = keys.app.main.tree_view
        siblings = [row.name for row in tree.rows if row.depth == tree.current.depth]
        assert tree.current.name == "model.layers"
        assert bytes_below("model.layers") == max(map(bytes_below, siblings))
        line = next(line for line in lines(keys.app) if line.startswith("▌"))
        assert f"{bytes_below('model.layers') / 2**20:.1f} MiB" in line


async def test_user_can_cast_mlps_to_fp8_and_read_the_drift_in_a_few_keys() -> None:
    async with job() as keys:
        await keys.press("c", *"*.mlp=fp8", "enter")
        cost = await keys.measured()
        experiment = keys.app.controller.experiment
        assert [str(rule) for rule in experiment.recipe.rules] == ["*.mlp=float8_e4m3fn"]
        assert cost > 0
        with safe_open(WEIGHTS, "pt") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        planned = sum(
            math.prod(shape) + 4 * shape[0] if ".mlp." in key else 4 * math.prod(shape) for key, shape in shapes.items()
        )
        assert experiment.plan.planned_bytes == planned
        assert f"KL {cost:.2e}".replace("e-0", "e-") in lines(keys.app)[0]
        assert (
            f"{planned / 2**20:.1f} of {sum(4 * math.prod(shape) for shape in shapes.values()) / 2**20:.1f} MiB"
            in screen(keys.app)
        )


async def test_user_can_find_the_worst_module_and_cast_it_back_in_a_few_keys() -> None:
    async with job() as keys:
        await keys.press("5")
        before = await keys.measured()
        await keys.press("d")
        experiment = keys.app.controller.experiment
        await keys.until(lambda: experiment.results.causes is not None)
        causes = experiment.results.causes
        assert causes is not None
        worst = max(causes.causes, key=lambda cause: cause.drift)
        await keys.press("x", "escape", "escape")
        assert [str(rule) for rule in experiment.recipe.rules] == ["*=float8_e4m3fn", f"{worst.name}=float32"]
        assert await keys.measured() < before
        assert keys.app.screen is keys.app.main


async def test_user_can_find_the_best_recipe_for_half_the_bytes_in_a_few_keys() -> None:
    async with job() as keys:
        await keys.until(lambda: keys.app.controller.experiment.model.live)
        await keys.press("s", "enter")
        experiment = keys.app.controller.experiment
        await keys.until(lambda: experiment.scan.finished)
        await keys.press("o")
        await keys.until(lambda: isinstance(keys.app.screen, OptimiseScreen) and keys.app.screen.recipe is not None)
        await keys.press("enter", "escape")
        await keys.measured()
        half = experiment.plan.stored_bytes / 2
        assert experiment.plan.planned_bytes <= half
        chosen = experiment.scan.prediction(experiment.tree, experiment.plan)
        assert chosen is not None
        front = experiment.scan.front(experiment.tree)
        assert chosen.value == pytest.approx(min(point.predicted for point in front.points if point.bytes <= half))
        assert keys.app.screen is keys.app.main


async def test_user_can_export_a_checkpoint_in_a_few_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with job() as keys:
        await keys.press("2", "e", "enter")
        await keys.until(lambda: any(tmp_path.glob("*/model.safetensors")))
        await keys.until(lambda: not keys.app.controller.activity.busy)
        await keys.press("q")
    (written,) = tmp_path.glob("*/model.safetensors")
    tensors, stored = load_file(written), load_file(WEIGHTS)
    assert tensors.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name].bfloat16()) for name, tensor in tensors.items())
