from __future__ import annotations

import copy
import gc
import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import architectures
from torch import nn

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.core import throttle
from dtype_engine.core.cancellation import never
from dtype_engine.core.errors import Cancelled
from dtype_engine.reports.text import drift_text
from dtype_engine.results.drift import Extent
from dtype_engine.runtime.measure import drift
from dtype_engine.runtime.measure.drift import DriftMeter
from dtype_engine.runtime.measure.listener import MeasurementListener
from dtype_engine.runtime.measure.modules.recorder import ModuleRecorder
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner

ALL = MeasurementListener(all_modules=lambda: True)


@pytest.mark.parametrize(
    ("dtype", "mean", "largest"), [("float16", 2.0458e-04, 2.2590e-04), ("bfloat16", 9.9789e-04, 1.6907e-03)]
)
def test_drift_figures_equal_plain_torch_and_are_near_those_in_the_tutorial(
    tinynet: Any, dtype: str, mean: float, largest: float
) -> None:
    """With one dtype everywhere the candidate is plain torch's `module.to(dtype)`, whose last bits are the processor's."""
    reference, candidate = copy.deepcopy(tinynet.model.module), copy.deepcopy(tinynet.model.module)
    (ids,) = tinynet.inputs.batches[0].args
    candidate.to(getattr(torch, dtype))
    with torch.no_grad():
        delta = (candidate(ids).double() - reference(ids).double()).abs()
    tinynet.cast("*", dtype)
    output = tinynet.drift().output
    assert output.mean_abs == pytest.approx(delta.mean().item(), rel=1e-6)
    assert output.max_abs == pytest.approx(delta.max().item(), rel=1e-6)
    # The tutorials' figures come from another processor: of their size, but for what rounding in another order may do.
    assert mean / 2 < output.mean_abs < 2 * mean
    assert largest / 2 < output.max_abs < 2 * largest


def test_float32_cast_of_a_float32_model_does_not_drift(make_llama: Callable[..., Path]) -> None:
    session = de.open(str(make_llama()))
    session.cast("*", "float32")
    report = session.drift()
    assert (report.output.max_abs, report.output.kl_max) == (0, 0)
    assert all(module.sqnr_db == math.inf for module in report.modules)


def test_memory_budget_for_kept_outputs_does_not_change_the_drift(make_llama: Callable[..., Path]) -> None:
    folder = str(make_llama())
    reports, sessions = [], []
    for budget in (10**9, 100_000):
        session = de.open(folder, options=de.Options(reference_bytes=budget))
        sessions.append(session)
        session.cast("*.mlp", "bfloat16")
        session.drift()
        reports.append(session.drift())
    assert (reports[0].output, reports[0].modules) == (reports[1].output, reports[1].modules)
    kept = [session.memory().kept_bytes for session in sessions]
    assert kept[0] is not None
    assert kept[1] is not None
    assert kept[1] <= 100_000 < kept[0]


def test_kept_outputs_stay_within_their_budget() -> None:
    inputs = [{"input_ids": architectures.tokens(length)} for length in (40, 60, 80)]
    module, _ = architectures.make("llama")
    in_full = de.open(module, inputs=inputs)
    in_full.drift()
    most = in_full.memory().kept_bytes
    assert most
    for share in (1, 3, 7, 10, 13, 17, 19):
        budget = most * share // 20
        session = de.open(module, inputs=inputs, options=de.Options(reference_bytes=budget))
        kept: list[int] = []
        for dtype in ("float16", "bfloat16"):
            session.cast("*.mlp", dtype)
            session.drift(MeasurementListener(on_sequence=lambda totals: kept.append(session.memory().kept_bytes or 0)))  # noqa: B023
        assert max(kept) <= budget


def test_outputs_of_modules_are_freed_when_a_measurement_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and not by the next collection of reference cycles: those of a large picture take gigabytes."""
    kept = list[weakref.ref[torch.Tensor]]()

    class Recorder(ModuleRecorder):
        def __call__(self, module: str, call: int, output: torch.Tensor) -> None:
            super().__call__(module, call, output)
            kept.extend(weakref.ref(each) for each in self.outputs.values())

    monkeypatch.setattr(drift, "ModuleRecorder", Recorder)
    module = nn.Sequential(nn.Linear(8, 37), nn.ReLU(), nn.Linear(37, 3))
    nothing_kept = de.Options(reference_bytes=1)
    session = de.open(module, inputs={"input": torch.ones(2, 8)}, options=nothing_kept)
    session.cast("*", "bfloat16")
    gc.collect()
    gc.disable()
    try:
        assert len(session.drift().modules) == 3
        assert len(kept) > 3
        assert [each for each in kept if each() is not None] == []
    finally:
        gc.enable()


def test_modules_too_large_for_memory_are_noted_as_not_compared(
    make_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = de.open(str(make_llama()))
    session.cast("*.mlp", "bfloat16")
    wanted = session.drift()
    monkeypatch.setattr(drift, "cache_budget", lambda device: 100_000)
    measured = DriftMeter(session.model, session.need_inputs(), budget=0).measure()
    assert measured.output == wanted.output
    assert set(measured.modules) < set(wanted.modules)
    assert "do not fit" in " ".join(measured.notices(measured.output))


def test_drift_so_far_equals_a_measurement_of_only_the_finished_sequences() -> None:
    """The shortest sequence runs first. The figures are always those of a measurement of the sequences so far, in input order."""
    ids = [architectures.tokens(length) for length in (9, 12, 6, 11, 10)]

    def meter(numbers: Sequence[int]) -> DriftMeter:
        model = de.open(architectures.make("llama")[0], inputs=[{"input_ids": ids[number]} for number in numbers])
        model.cast("*.mlp", "int8")
        return DriftMeter(model.model, model.inputs)

    whole = meter(range(5))
    done = 0
    for totals in whole.readings(ALL):
        done += 1
        assert len(totals.numbers) == len(totals.modules_numbers) == done
        assert totals.numbers[0] == 2
        alone = meter(sorted(totals.numbers)).measure(ALL)
        assert totals.output == alone.output
        assert totals.modules == alone.modules
        positions = sum(ids[number].shape[1] for number in totals.numbers)
        assert (totals.extent.done, totals.extent.total) == (done, 5)
        assert totals.output.positions == totals.extent.positions == positions
    assert done == 5
    assert (totals.extent.kl_error, totals.extent.rel_l2_error) == (0.0, 0.0)
    assert whole.measure().output == totals.output  # what is kept changes nothing


def test_drift_over_sequences_equals_that_of_plain_torch_in_input_order() -> None:
    """Every figure of the output by plain torch, in the order of the inputs."""
    module, _ = architectures.make("llama")
    ids = [architectures.tokens(length) for length in (9, 6, 12)]
    session = de.open(module, inputs=[{"input_ids": each} for each in ids])
    session.cast("*.mlp", "bfloat16")
    runner = ForwardRunner(session.model, session.settings, never)
    with torch.no_grad():
        reference = [architectures.make("llama")[0](input_ids=each).logits.double() for each in ids]
        candidate = [runner.candidate(lambda each=each: module(input_ids=each).logits).output.double() for each in ids]
    r, c = (torch.cat([logits[0] for logits in both]) for both in (reference, candidate))
    kl = nn.functional.kl_div(c.log_softmax(-1), r.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    output = session.drift().output
    assert output.kl_mean == pytest.approx(kl.mean().item(), rel=1e-9)
    assert output.rel_l2 == pytest.approx(((c - r).norm() / r.norm()).item(), rel=1e-12)
    assert output.max_abs == (c - r).abs().max().item()


def test_measurement_stops_at_the_required_precision(make_llama: Callable[..., Path]) -> None:
    inputs = [{"input_ids": architectures.tokens(length)} for length in (8, 9, 10, 11, 12, 13, 14, 15)]
    session = de.open(architectures.make("llama")[0], inputs=inputs, options=de.Options(precision=0.2))
    session.cast("*", "int8")
    report = session.drift()
    assert 1 < report.sequences.done < report.sequences.total == 8
    assert report.sequences.kl_error is not None
    assert 0 < report.sequences.kl_error <= 0.2
    in_full = session.drift(MeasurementListener(precision=lambda: None))
    assert (in_full.sequences.done, in_full.sequences.kl_error) == (8, 0.0)
    assert in_full.output.positions == 92


def test_progress_total_is_reduced_if_the_precision_is_reached_early() -> None:
    inputs = [{"input_ids": architectures.tokens(8 + number % 5)} for number in range(60)]
    session = de.open(architectures.make("llama")[0], inputs=inputs)
    session.cast("*", "int8")

    def told(precision: float | None) -> tuple[int, list[tuple[int, int]]]:
        shares: list[tuple[int, int]] = []
        report = session.drift(
            MeasurementListener(
                on_progress=lambda run, done, total: shares.append((done, total)), precision=lambda: precision
            )
        )
        return report.sequences.done, shares

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throttle, "INTERVAL_S", 0.0)
        everything, shares = told(None)
        assert {total for _, total in shares} == {2 * sum(10 for _ in range(60))}
        assert everything == 60
        few, shares = told(0.1)
    assert few < 30
    assert shares[0][1] > 500  # nothing is known yet; references were kept
    done, total = shares[-1]
    assert 0.6 < done / total <= 1
    assert all(one <= other + 0.1 for one, other in pairwise([done / total for done, total in shares]))


@pytest.mark.parametrize("error", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("precision", [0.02, 0.2])
def test_estimated_number_of_sequences_is_just_enough_for_the_precision(error: float, precision: float) -> None:
    extent = Extent(done=10, total=1000, positions=0, kl_error=error)
    enough = 10 + round(990 * extent.rest_for(precision))
    after = error * math.sqrt((1 / enough - 1 / 1000) / (1 / 10 - 1 / 1000))
    assert after <= precision * 1.01
    assert enough == 11 or after >= precision * 0.95
    assert extent.rest_for(None) == replace(extent, kl_error=None, rel_l2_error=None).rest_for(0.1) == 1


def test_sampling_error_is_unknown_for_mixtures_of_experts() -> None:
    module, _ = architectures.make("mixtral")
    inputs = [{"input_ids": architectures.tokens(length)} for length in (6, 8, 10)]
    session = de.open(module, inputs=inputs, options=de.Options(precision=0.9))
    session.cast("*", "int8")
    errors = []
    report = session.drift(MeasurementListener(on_sequence=lambda totals: errors.append(totals.extent.error)))
    assert errors == [None, None, 0.0]
    assert report.sequences.whole


def test_drift_measurement_closed_after_one_result_removes_its_hooks() -> None:
    module, _ = architectures.make("llama")
    session = de.open(module, inputs=[{"input_ids": architectures.tokens(length)} for length in (9, 12)])
    session.cast("*.mlp", "int8")
    meter = DriftMeter(session.model, session.inputs)
    readings = meter.readings(MeasurementListener())
    assert next(readings).numbers == [0]
    readings.close()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert meter.measure().output == session.drift().output


def test_cancelled_drift_measurement_stops_within_one_module_call(make_llama: Callable[..., Path]) -> None:
    session = de.open(str(make_llama()))
    session.cast("*", "bfloat16")
    wanted = session.drift().output
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > 10

    with pytest.raises(Cancelled):
        session.drift(cancelled=cancelled)
    assert asked == 11
    assert session.drift().output == wanted


def test_planted_nan_is_counted_in_the_module_where_it_arises() -> None:
    module, inputs = architectures.make("gpt2")
    session = de.open(module, inputs=inputs)
    session.drift()
    session.model.weights["transformer.h.1.mlp.c_fc.bias"].tensor.data = torch.full((128,), math.nan)
    report = session.drift()
    assert report.output.nonfinite == report.output.elements
    assert report.output.sqnr_db == -math.inf
    first = next(reading for reading in report.modules if reading.nonfinite)
    assert first.name == "transformer.h.1.mlp.c_fc"


def test_module_whose_outputs_are_all_nonfinite_has_no_sqnr() -> None:
    module, inputs = architectures.make("gpt2")
    module.transformer.h[1].mlp.c_fc.bias.data.fill_(math.nan)
    readings = {reading.name: reading for reading in de.open(module, inputs=inputs).drift().modules}
    assert readings["transformer.h.0"].sqnr_db == math.inf
    assert readings["transformer.h.1.mlp.c_fc"].sqnr_db is None
    assert readings["transformer.h.1"].nonfinite == 0, "the candidate lost nothing that the reference had"


def test_reference_with_some_nonfinite_values_is_reported() -> None:
    module, inputs = architectures.make("gpt2")
    module.lm_head.weight = nn.Parameter(module.lm_head.weight.detach().clone())
    module.lm_head.weight.data[5] = math.nan
    report = de.open(module, inputs=inputs).drift()
    positions = report.output.positions
    assert report.notices == (
        f"the reference itself is not finite in {positions} of the {report.output.elements:,} values of logits: "
        "the metrics cover the other values, and KL is undefined",
    )
    assert "; reference float32, itself not finite" in drift_text(report).splitlines()[0]


@pytest.mark.parametrize("name", architectures.ZOO)
def test_reference_of_a_bfloat16_model_equals_the_plain_float32_model(name: str) -> None:
    module, inputs = architectures.make(name)
    module.to(torch.bfloat16)
    plain, _ = architectures.make(name)
    plain.load_state_dict(module.float().state_dict())
    buffers = dict(module.named_buffers())
    for key, buffer in plain.named_buffers():
        if buffer.is_floating_point():
            buffer.data = buffers[key].data.float()
    with torch.no_grad():
        raw = plain(**inputs) if isinstance(inputs, dict) else plain(*inputs)
    stored, _ = architectures.make(name)
    stored.to(torch.bfloat16)
    session = de.open(stored, inputs=inputs)
    session.drift()
    record = session._drift.meter._records[0]  # type: ignore[union-attr]
    expected = main_output(raw)[1]
    error = (record.output.double() - expected.double()).norm() / expected.double().norm()
    assert error < 1e-6


def test_session_measures_drift_after_a_rule_without_matches(tinynet: Any) -> None:
    with pytest.raises(de.UserError, match="matches nothing"):
        tinynet.cast("linear_9", "float16")
    assert tinynet.recipe == Recipe()
    tinynet.apply(Recipe((Rule("linear_9", "float16"), Rule("head", "float16"))))
    assert tinynet.plan.unmatched == [0]
    assert tinynet.drift().output.max_abs > 0


def test_modules_are_reported_during_a_pass_that_was_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch raises in the middle of the model. The pass is then run again with casts, and reports its modules at once."""

    class Stubborn(nn.Module):
        """Its own code asks for float32 inside, so that everything in bfloat16 needs the rules."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.second = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            between = self.first(x)
            if between.dtype == torch.bfloat16:
                throttle.INTERVAL_S = 0.0  # as on a slow machine: from the second try on there is time to tell
            found: torch.Tensor = self.second(between.float())
            return found

    torch.manual_seed(0)
    monkeypatch.setattr(throttle, "INTERVAL_S", 1e9)
    session = de.open(Stubborn(), inputs=(torch.randn(3, 4).bfloat16(),))
    session.cast("*", "bfloat16")
    told: list[str] = []
    report = session.drift(MeasurementListener(on_modules=lambda modules: told.extend(each.name for each in modules)))
    assert report.output.max_abs > 0
    assert {"first.0", "first.1", "second"} <= set(told)


def test_results_of_slow_modules_are_reported_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are reported after ten times the interval, even if only one call has ended in that time."""

    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return super().forward(x)

    session = de.open(nn.Sequential(*(Slow(4, 4) for _ in range(5))), inputs=(torch.ones(2, 4),))
    session.cast("*", "bfloat16")
    monkeypatch.setattr(throttle, "INTERVAL_S", 0.001)
    told: list[tuple[str, ...]] = []
    session.drift(MeasurementListener(on_modules=lambda modules: told.append(tuple(each.name for each in modules))))
    assert ("1",) in told
    assert ("2",) in told


def test_progress_is_reported_for_short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The observers of a pass report nothing in its first tenth of a second, and many passes are shorter."""
    session = de.open(architectures.make("llama")[0], inputs=[{"input_ids": architectures.tokens(9)}] * 40)
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(throttle, "INTERVAL_S", 0.005)
    session.drift(MeasurementListener(on_progress=lambda run, done, total: told.append((done, total))))
    assert told[0] == (0, 80 * 9)
    assert len(told) > 5
    assert told == sorted(told)
    assert all(done <= total for done, total in told)
