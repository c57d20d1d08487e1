"""Causes against the exhaustive truth, and what a planted bad layer is called."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import architectures
from torch import nn

import dtype_engine as de
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.runtime.measure import attribution as causes


def kl_alone(session: Any, module: str, dtype: str) -> float:
    """The measured KL of one module cast by itself."""
    session.apply(de.Recipe((de.Rule(module, dtype),)))
    return float(session.drift().output.kl_mean)


def text(tmp_path: Path) -> de.Options:
    """One sequence of text, fewer positions than causes look at, so that both see the same."""
    file = tmp_path / "text.txt"
    file.write_text("def add(first, second):\n    return first + second\n" * 4)
    return de.Options(texts=(file,))


def test_the_demo_model_against_each_module_cast_by_itself(tmp_path: Path) -> None:
    session = de.open(options=text(tmp_path))
    session.cast("*", "bfloat16")
    found = {cause.name: cause for cause in session.causes().causes}
    # The tied table is one tensor with two uses, which no rule tells apart.
    modules = [name for name in found if name not in ("model.embed_tokens", "lm_head")]
    assert len(modules) == 6 * 9 + 1
    exact = de.open(options=text(tmp_path))
    for name in modules:
        assert found[name].drift == pytest.approx(kl_alone(exact, name, "bfloat16"), rel=1e-9), name


def test_the_whole_is_the_measured_drift_and_shares_are_of_it(tmp_path: Path) -> None:
    session = de.open(options=text(tmp_path))
    session.cast("*", "bfloat16")
    session.cast("*.mlp", "int8")
    report = session.causes()
    assert report.whole == pytest.approx(session.drift().output.kl_mean, rel=1e-9)
    for cause in report.causes:
        assert cause.share == cause.drift / report.whole
    assert report.together == pytest.approx(sum(cause.drift for cause in report.causes))
    assert [cause.drift for cause in report.causes] == sorted((c.drift for c in report.causes), reverse=True)


def test_the_local_error_is_that_of_the_module_on_the_references_inputs() -> None:
    module, inputs = architectures.make("llama")
    heard: dict[str, Any] = {}
    name = "model.layers.1.mlp.down_proj"
    linear = module.get_submodule(name)
    handle = linear.register_forward_hook(lambda m, args, output: heard.update(given=args[0], gave=output))
    with torch.no_grad():
        module(**inputs)
    handle.remove()
    weight = linear.weight.detach().clone()
    session = de.open(module, inputs=inputs)
    session.cast("*", "bfloat16")
    found = next(cause for cause in session.causes().causes if cause.name == name)
    with torch.no_grad():
        cast = nn.functional.linear(heard["given"].bfloat16(), weight.bfloat16()).double()
    delta = cast - heard["gave"].double()
    expected = 20 * math.log10(heard["gave"].double().norm() / delta.norm())
    assert found.local_sqnr_db == pytest.approx(expected, rel=1e-5)


def test_a_planted_bad_layer_is_named(make_llama: Callable[..., Path]) -> None:
    session = de.open(str(make_llama(num_hidden_layers=4)))
    session.cast("*", "bfloat16")
    bad = "model.layers.2.mlp.down_proj"
    session.model.weights[f"{bad}.weight"].tensor.data.mul_(1.5)
    report = session.causes()
    assert report.causes[0].name == bad
    assert report.causes[0].share is not None
    assert 0.9 < report.causes[0].share < 1.1
    assert (report.causes[1].share or 0) < 0.05


def test_a_bfloat16_checkpoint_as_stored_and_its_reference_in_no_second_copy(
    monkeypatch: pytest.MonkeyPatch, make_llama: Callable[..., Path]
) -> None:
    monkeypatch.setattr(causes, "ENOUGH_POSITIONS", 10**6)  # all of the inputs, as the measurement
    session = de.open(str(make_llama(dtype="bfloat16")))
    report = session.causes()
    assert report.whole == pytest.approx(session.drift().output.kl_mean, rel=1e-6)
    assert len(report.causes) == 2 * 9 + 3
    assert all(weight.dtype == "bfloat16" for weight in session.model.weights.values() if weight.info.persistent)


def test_nothing_drifts_and_nothing_is_blamed(make_llama: Callable[..., Path]) -> None:
    report = de.open(str(make_llama())).causes()
    assert (report.whole, report.causes) == (0.0, ())


@pytest.mark.parametrize("name", ["torch_lstm", "torch_attention", "mixtral", "resnet", "t5", "whisper", "mamba"])
def test_other_architectures(name: str) -> None:
    module, inputs = architectures.make(name)
    session = de.open(module, inputs=inputs)
    session.cast("*", "bfloat16")
    report = session.causes()
    assert report.whole > 0
    assert report.causes
    assert all(math.isfinite(cause.drift) and cause.drift >= 0 for cause in report.causes)


def test_too_many_modules_are_run_as_subtrees_and_the_worst_is_still_found(
    monkeypatch: pytest.MonkeyPatch, make_llama: Callable[..., Path]
) -> None:
    session = de.open(str(make_llama(num_hidden_layers=6)))
    session.cast("*", "bfloat16")
    session.model.weights["model.layers.4.mlp.up_proj.weight"].tensor.data.mul_(1.5)
    alone = {cause.name: cause.drift for cause in session.causes().causes}
    monkeypatch.setattr(causes, "MOST_PASSES", 24)
    report = session.causes()
    assert report.passes <= (24 + 2) * 2  # two sequences
    assert report.causes[0].name == "model.layers.4.mlp.up_proj"
    assert report.causes[0].drift == pytest.approx(alone["model.layers.4.mlp.up_proj"], rel=1e-9)
    assert sum(cause.modules for cause in report.causes) == len(alone)


def test_causes_stop_when_asked_and_are_not_told_under_autocast(make_llama: Callable[..., Path]) -> None:
    session = de.open(str(make_llama()))
    session.cast("*", "bfloat16")
    told: list[tuple[int, int]] = []
    with pytest.raises(Cancelled):
        session.causes(lambda done, total: told.append((done, total)), lambda: len(told) >= 3)
    assert told == [(0, causes.MOST_PASSES), (1, 21), (2, 21)]
    session.settings = de.RunSettings(autocast="bfloat16")
    with pytest.raises(UserError, match="autocast"):
        session.causes()
