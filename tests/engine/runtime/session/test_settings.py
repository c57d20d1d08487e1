"""The settings of a run, against plain torch under the same settings."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any, ClassVar

import pytest
import torch
from tests.helpers import architectures
from tests.helpers.measured_on import DEVICE
from torch import nn

import dtype_engine as de
from dtype_engine.core.cancellation import never
from dtype_engine.core.options import RunSettings
from dtype_engine.core.throttle import Throttle
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner


def candidate(session: de.Session, settings: RunSettings) -> torch.Tensor:
    with ForwardRunner(session.model, settings, never) as runner:
        return main_output(runner.candidate(runner.candidate_call(session.need_inputs().batches[0])).output)[1]


@pytest.mark.parametrize("autocast", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "bert", "vit", "blip", "resnet", "t5"])
def test_autocast_equals_that_of_torch(name: str, autocast: Any) -> None:
    module, inputs = architectures.make(name)
    plain = copy.deepcopy(module)
    session = de.open(module, inputs=inputs)
    call = session.inputs.batches[0]  # type: ignore[union-attr]
    with torch.no_grad(), torch.autocast(DEVICE, getattr(torch, autocast)):
        expected = main_output(plain(*call.args, **call.kwargs))[1]
    assert torch.equal(candidate(session, RunSettings(autocast=autocast)), expected)


@pytest.mark.parametrize("name", ["llama", "blip", "torch_lstm", "mixtral"])
def test_mixed_dtypes_run_under_autocast(name: str) -> None:
    module, inputs = architectures.make(name)
    session = de.open(module, inputs=inputs)
    session.settings = RunSettings(autocast="bfloat16")
    for seed, palette in enumerate(architectures.PALETTES.values()):
        session.apply(architectures.random_recipe(session, palette, seed))
        report = session.drift()
        assert report.output.nonfinite == 0
        assert report.output.sqnr_db > 0
        assert report.settings == "autocast bfloat16"


@pytest.mark.parametrize("rule", ["*=float16", "*.mlp=float16"])
def test_drift_under_autocast_does_not_depend_on_how_often_results_are_reported(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU autocast refuses to join tensors in float16; what is told between two modules is what is told at the end."""
    found = []
    for every in (3, math.inf):
        asked = itertools.count(1)
        monkeypatch.setattr(
            Throttle, "due", lambda self, last=False, every=every, asked=asked: last or next(asked) % every == 0
        )
        session = de.open()
        session.settings = RunSettings(autocast="bfloat16")
        session.cast(*rule.split("="))
        found.append(session.drift())
    assert found[0].output == found[1].output
    assert found[0].modules == found[1].modules


def test_changed_run_settings_invalidate_kept_outputs() -> None:
    session = de.open()
    session.drift()
    session.settings = RunSettings(autocast="bfloat16")
    changed = session.drift()
    assert not changed.seconds.reused
    assert changed.output.max_abs > 0
    session.settings = RunSettings()
    assert session.drift().output.max_abs == 0


def test_outputs_of_earlier_settings_are_not_reused_after_a_later_cast() -> None:
    autocast = RunSettings(autocast="bfloat16")
    session, fresh = de.open(), de.open(options=de.Options(settings=autocast))
    session.drift()
    session.settings = autocast
    for each in (session, fresh):
        each.cast("model.layers.2.mlp", "float16")
    assert session.drift().output == fresh.drift().output


class Asked(nn.Module):
    """Notes which dtype its input came in: on its class, since a pass leaves what a module has itself as it was."""

    seen: ClassVar[list[torch.dtype]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return self.layer(x)


def test_float_inputs_are_cast_to_the_model_dtype_only_if_set() -> None:
    module = Asked()
    module.seen.clear()
    session = de.open(module, inputs=(torch.randn(3, 2),))
    session.cast("*", "bfloat16")
    candidate(session, RunSettings())
    assert set(module.seen) == {torch.float32}
    module.seen.clear()
    found = candidate(session, RunSettings(float_inputs="model"))
    assert set(module.seen) == {torch.bfloat16}
    assert found.dtype == torch.bfloat16
    session.cast("*", "int8")
    module.seen.clear()
    candidate(session, RunSettings(float_inputs="model", compute="float16"))
    assert set(module.seen) == {torch.float16}


def test_autocast_casts_are_listed_in_the_flow() -> None:
    session = de.open(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), inputs=(torch.randn(2, 4),))
    assert session.flow() == ()
    session.settings = RunSettings(autocast="bfloat16")
    found = {(cast.module, cast.operation, cast.source, cast.target, cast.elements) for cast in session.flow()}
    assert found == {("0", "linear", "float32", "bfloat16", 8 + 12 + 3)}
    assert not any(cast.torch_raises for cast in session.flow())
