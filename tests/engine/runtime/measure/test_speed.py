from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dtype_engine as de
from dtype_engine.core.errors import Cancelled
from dtype_engine.runtime.measure import speed


def test_speed_is_measured_for_reference_stored_and_candidate_weights(make_llama: Callable[..., Path]) -> None:
    session = de.open(str(make_llama(dtype="bfloat16")))
    session.cast("*.mlp", "float16")
    planned = dict(session.plan.dtypes)
    told: list[tuple[str, int, int]] = []
    report = session.speed(lambda *step: told.append(step), repeats=3)
    assert [(row.what, row.dtypes) for row in report.rows] == [
        ("reference", "f32"), ("as stored", "bf16"), ("candidate", "f16 + bf16"),
    ]  # fmt: skip
    assert [row.under_rules for row in report.rows] == [False, False, True]
    for row in report.rows:
        assert row.repeats == 3
        assert 0 < row.fastest <= row.seconds <= row.slowest
        assert row.tokens_per_second == pytest.approx(4 * 128 / row.seconds)
    assert {told[0], told[-1]} == {("reference", 0, 12), ("candidate", 11, 12)}, "of all rows"
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert {name: weight.dtype for name, weight in session.model.weights.items()} == planned


def test_speed_of_stored_weights_equal_to_the_reference_is_measured_once(make_llama: Callable[..., Path]) -> None:
    session = de.open(str(make_llama(dtype="float32")))
    assert [row.what for row in session.speed(repeats=3).rows] == ["reference", "candidate"]


def test_cancelled_speed_measurement_keeps_the_casts(make_llama: Callable[..., Path]) -> None:
    session = de.open(str(make_llama(dtype="float32")))
    session.cast("*", "bfloat16")
    seen: list[Any] = []
    with pytest.raises(Cancelled):
        session.speed(lambda *step: seen.append(step), lambda: len(seen) > 1)
    assert {weight.dtype for weight in session.model.weights.values() if weight.info.persistent} == {"bfloat16"}


def test_speed_of_a_reference_too_large_for_memory_is_not_measured_but_noted(
    make_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = de.open(str(make_llama(dtype="bfloat16")))
    monkeypatch.setattr(speed, "free_bytes", lambda device: 100)
    report = session.speed(repeats=3)
    assert [row.what for row in report.rows] == ["candidate"]
    assert "reference: not timed" in report.notices[0]


def test_speed_of_inputs_without_tokens_has_no_tokens_per_second() -> None:
    session = de.open(torch.nn.Linear(3, 2), inputs=(torch.randn(4, 3),))
    assert all(row.tokens_per_second is None for row in session.speed(repeats=3).rows)
