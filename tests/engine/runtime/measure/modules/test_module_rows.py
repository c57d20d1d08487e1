"""Samples of rows against plain torch over all of them, in float64."""

from __future__ import annotations

import gc
import math
import weakref
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
import torch
from tests.helpers import architectures

import dtype_engine as de
from dtype_engine.results.drift import ModuleDrift
from dtype_engine.runtime.measure.modules import module_rows
from dtype_engine.runtime.measure.modules.comparison import OutputComparer, OutputRecorder, compare_output
from dtype_engine.runtime.measure.modules.module_rows import MOST_ROWS, KeptRows, RowKeeper, rows_each
from dtype_engine.runtime.measure.modules.module_totals import ModuleTotal, module_drifts
from dtype_engine.runtime.measure.modules.row_comparison import ModuleSums, RowComparison, estimated_total


def tokens(rows: int, width: int, seed: int, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs as models have them: energies a hundredfold apart, the first token's enormous, and errors that grow with them
    (spread 1) or do not (0).
    """
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(torch.randn(rows, 1, generator=generator) * 0.7)
    scale[0] = 100.0
    reference = scale * torch.randn(rows, width, generator=generator)
    relative = 0.01 * torch.exp(torch.randn(rows, 1, generator=generator) * 0.3)
    return reference, reference + relative * scale**spread * torch.randn(rows, width, generator=generator)


def keep_rows(output: torch.Tensor, in_full: bool = False, rows: int = MOST_ROWS) -> KeptRows:
    keeper = RowKeeper(in_full, rows)
    kept = keeper.keep(output)
    keeper.finish()
    return kept


def reading(reference: torch.Tensor, candidate: torch.Tensor, in_full: bool = False) -> ModuleDrift:
    return module_drifts({"module": ModuleTotal(compare_output(keep_rows(reference, in_full), candidate))})[0]


def sqnr(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    r, c = reference.double(), candidate.double()
    return float(20 * torch.log10(r.norm() / (c - r).norm()))


@pytest.mark.parametrize("shape", [(3, 50, 40), (700, 40), (40,), (), (0, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_rows_give_the_figures_of_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    reference = torch.randn(shape, generator=generator)
    candidate = (reference + 0.1 * torch.randn(shape, generator=generator)).to(dtype)
    found = reading(reference, candidate, in_full=True)
    if not reference.numel():
        assert (found.sqnr_db, found.max_abs) == (math.inf, 0)
        return
    assert found.sqnr_db == pytest.approx(sqnr(reference, candidate), rel=1e-5)
    assert found.max_abs == pytest.approx(float((candidate.double() - reference.double()).abs().max()), rel=1e-5)
    assert (found.nonfinite, found.sqnr_error_db) == (0, 0.0)


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
def test_a_sample_is_within_two_of_its_errors_in_five_of_six(spread: float, sequences: int) -> None:
    within = []
    for seed in range(60):
        sums, outputs = ModuleSums(), [tokens(180, 512, 100 * number + seed, spread) for number in range(sequences)]
        for reference, candidate in outputs:
            sums.add(compare_output(keep_rows(reference, False, rows_each(sequences, sequences)), candidate))
        (found,) = module_drifts({"module": ModuleTotal(sums)})
        assert found.sqnr_db is not None
        assert 0 < found.sqnr_error_db < 3
        expected = sqnr(*map(torch.cat, zip(*outputs, strict=True)))
        within.append(abs(found.sqnr_db - expected) <= 2 * found.sqnr_error_db)
    assert sum(within) >= 50


@pytest.mark.parametrize(
    ("compared", "total", "rows"), [(1, 1, 16), (2, 2, 16), (3, 3, 10), (4, 4, 8), (500, 500, 8), (1, 2, 8), (2, 6, 8)]
)
def test_the_largest_rows_are_always_taken(compared: int, total: int, rows: int) -> None:
    reference, _ = tokens(180, 1024, 0)
    kept = keep_rows(reference, False, rows_each(compared, total))
    assert kept.index is not None
    assert len(kept.index) == len(set(kept.index.tolist())) == rows
    largest = reference.double().norm(dim=-1).topk(kept.certain).indices
    assert set(kept.index[: kept.certain].tolist()) == set(largest.tolist())
    assert float(kept.energy) == pytest.approx(float(reference.double().square().sum()), rel=1e-5)


def test_the_estimate_of_a_total_is_that_of_the_formula() -> None:
    values = torch.tensor([[100.0, 50.0, 8.0, 3.0, 2.0, 1.0]], dtype=torch.float64)
    times, energies = [1.0, 1.0, 4.0, 5.0, 6.0, 5.0], [0.0, 0.0, 80.0, 50.0, 30.0, 10.0]
    total, variance = estimated_total(values, torch.tensor([[times, energies]], dtype=torch.float64), 2, 22)
    assert float(total) == 150 + 32 + 15 + 12 + 5
    ratios = [32 / 80, 15 / 50, 12 / 30, 5 / 10]
    steps = [(one - other) ** 2 / 2 for one, other in pairwise(ratios)]
    neighbours = [steps[0], (steps[0] + steps[1]) / 2, (steps[1] + steps[2]) / 2, steps[2]]
    stated = (0.5 * 64 / 170) ** 2
    expected = sum(
        energy**2 * (1 - 1 / 5) * (4 * measured + 3 * stated) / 7
        for energy, measured in zip(energies[2:], neighbours, strict=True)
    )
    assert float(variance) == pytest.approx(expected)


@pytest.mark.parametrize("in_full", [True, False])
def test_values_that_are_not_finite(in_full: bool) -> None:
    reference, candidate = tokens(180, 1024, 3)
    masked, masked_too = reference.clone(), candidate.clone()
    masked[5, 7] = masked_too[5, 7] = -math.inf  # a mask is one that both have
    found = reading(masked, masked_too, in_full)
    assert found.nonfinite == 0
    assert found.sqnr_db == pytest.approx(sqnr(reference, candidate), abs=3 * found.sqnr_error_db + 0.01)
    candidate[0, 3] = math.nan  # the first row is the largest
    found = reading(reference, candidate, in_full)
    assert (found.nonfinite, found.sqnr_db, found.max_abs) == (1, -math.inf, math.inf)
    nothing = torch.full_like(reference, math.nan)
    assert reading(nothing, nothing, in_full).sqnr_db is None


def test_outputs_of_all_kinds_are_finished_together_as_each_by_itself() -> None:
    outputs = [tokens(rows, width, 5)[0] for rows in (180, 90, 4) for width in (1024, 64)] * 2
    outputs[0] = outputs[0].clone()
    outputs[0][5, 7] = math.inf
    outputs[1] = outputs[1].double()
    keeper = RowKeeper(False)
    together = [keeper.keep(output) for output in outputs]
    keeper.finish()
    for kept, alone in zip(together, map(keep_rows, outputs), strict=True):
        assert torch.equal(kept.rows, alone.rows)
        assert float(kept.energy) == pytest.approx(float(alone.energy))
        torch.testing.assert_close(kept.strata, alone.strata)


def test_large_outputs_do_not_overflow() -> None:
    reference, candidate = tokens(180, 1024, 4)
    found = reading(reference * 1e30, candidate * 1e30)
    assert found.sqnr_db == pytest.approx(reading(reference, candidate).sqnr_db, abs=0.01)


def test_a_measurement_samples_modules_and_goes_over_all_when_asked() -> None:
    """The main output and what returns it are compared in full in any case; modules that were sampled are run again."""
    inputs = [{"input_ids": architectures.tokens(length)} for length in (400, 300)]
    session = de.open(architectures.make("llama")[0], inputs=inputs)
    session.cast("*", "bfloat16")
    sampled = session.drift()
    asked: list[bool] = []

    def from_the_second_on() -> bool:
        asked.append(True)
        return len(asked) > 1

    later = session.drift(modules_in_full=from_the_second_on)
    exact = de.open(architectures.make("llama")[0], inputs=inputs, options=de.Options(modules="exact"))
    exact.cast("*", "bfloat16")
    full = exact.drift()
    assert sampled.output == later.output == full.output
    assert later.modules == full.modules
    assert all(each.sqnr_error_db == 0 for each in full.modules)
    by_name = {each.name: each for each in full.modules}
    errors = [(each, by_name[each.name]) for each in sampled.modules if each.sqnr_error_db]
    assert len(errors) > 10
    assert all(one.sqnr_db is not None and other.sqnr_db is not None for one, other in errors)
    far = [one.name for one, other in errors if abs(one.sqnr_db - other.sqnr_db) > 3 * one.sqnr_error_db]  # type: ignore[operator]
    assert len(far) <= len(errors) // 10
    head = next(each for each in sampled.modules if each.name == "lm_head")
    assert (head.sqnr_db, head.sqnr_error_db) == (sampled.output.sqnr_db, 0.0)
    assert session.drift().modules == sampled.modules  # another time in a sample, and the same one


def test_each_output_of_a_pass_is_compared_with_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of many outputs are compared in one go. Not all are called again, some in another dtype, one is not finite; two may be
    compared with the same of the reference, and some have too many rows for that.
    """
    monkeypatch.setattr(module_rows, "_MOST_TOGETHER", 1 << 17)
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, 300, 512), (1, 300, 96), (1, 7, 512), (1, 300, 20_000), (300, 512), (2, 40, 2048), (1, 300, 1)] * 6
    references = [torch.randn(shape, generator=generator) for shape in shapes]
    keeper = RowKeeper(in_full=False)
    kept = [keeper.keep(reference) for reference in references]
    keeper.finish()
    packs = {id(each.pack) for each in kept if each.pack is not None}
    assert 4 < len(packs) < len(kept) / 2
    assert [each.pack is None for each in kept[:7]] == [False, False, False, True, False, False, False]
    comparison, found = RowComparison(), list[tuple[int, torch.Tensor, ModuleSums]]()

    def add(number: int, candidate: torch.Tensor) -> None:
        sums = ModuleSums()
        comparison.add(kept[number], candidate, sums)
        found.append((number, candidate.clone(), sums))
        candidate.zero_()  # later in the pass something writes to it

    for number in reversed(range(len(kept))):
        if number % 5 == 3:
            continue
        noise = 0.01 * torch.randn(shapes[number], generator=generator)
        candidate = (references[number] + noise).to((torch.bfloat16, torch.float32)[number % 4 == 0])
        if number == 14:
            candidate[..., 5] = torch.inf
        add(number, candidate)
    for number in (1, 8):
        add(number, references[number] * 1.5)
    comparison.finish()
    for number, candidate, sums in found:
        alone = compare_output(kept[number], candidate)
        assert (sums.nonfinite, sums.comparable) == (alone.nonfinite, alone.comparable)
        assert (sums.nonfinite > 0) == (number == 14)
        for figure in ("energy", "noise", "max_abs", "variance"):
            assert getattr(sums, figure) == pytest.approx(getattr(alone, figure), rel=1e-5), (number, figure)
        rows = kept[number].of(candidate).double().numpy() - kept[number].rows.double().numpy()
        if number != 14:
            assert sums.max_abs == pytest.approx(np.abs(rows).max(), rel=1e-6)
            assert sums.energy == pytest.approx(float((references[number].double() ** 2).sum()), rel=1e-6)


def test_observers_are_gone_with_their_pass() -> None:
    """They hold outputs of hundreds of megabytes, and no cycle of references is collected while a model is measured."""
    output = torch.randn(50, 8)
    gc.disable()
    try:
        recorder = OutputRecorder(1 << 20, set())
        recorder("module", 0, output)
        assert recorder.finish()
        comparer = OutputComparer(recorder.kept, {}, lambda calls: None, lambda modules: None)
        comparer("module", 0, output)
        observers = weakref.ref(recorder), weakref.ref(comparer)
        del recorder, comparer
        assert [observer() for observer in observers] == [None, None]
    finally:
        gc.enable()


class Writes(torch.nn.Module):
    """Three layers, each of whose outputs is written to by the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))
        self.rectify = torch.nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.rectify(layer(x)).mul_(0.5)
        return x


@pytest.mark.parametrize("modules", ["sampled", "exact"])
def test_outputs_that_are_written_to_afterwards_are_those_that_the_module_gave(
    modules: Literal["sampled", "exact"],
) -> None:
    torch.manual_seed(0)
    module, inputs = Writes().eval(), [{"x": torch.randn(5, 32)}, {"x": torch.randn(400, 32)}]
    session = de.open(module, inputs=inputs, options=de.Options(modules=modules))
    session.cast("*", "bfloat16")
    found = {each.name: each for each in session.drift().modules}
    outputs: dict[str, list[torch.Tensor]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        alone = Writes().eval().to(dtype)
        handles = [
            each.register_forward_hook(lambda _, __, out, name=name: outputs.setdefault(name, []).append(out.clone()))
            for name, each in alone.named_modules()
            if name.startswith("layers.")
        ]
        with torch.no_grad():
            for given in inputs:
                alone(given["x"].to(dtype))
        del handles
    for name, (*reference, first, second) in outputs.items():
        expected = sqnr(torch.cat(reference), torch.cat([first, second]))
        assert found[name].sqnr_db == pytest.approx(expected, abs=3 * found[name].sqnr_error_db + 1e-4)


class Head(torch.nn.Module):
    """Returns what its last layer gives, and in bfloat16 something else that is made of it."""

    def __init__(self, in_bfloat16: Literal["copies", "writes", "goes on"]) -> None:
        super().__init__()
        self.first, self.head = torch.nn.Linear(32, 32), torch.nn.Linear(32, 48)
        self.narrow = torch.nn.Linear(48, 48)
        self.in_bfloat16 = in_bfloat16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.as_tensor(self.head(self.first(x)))
        if out.dtype == torch.float32:
            return out
        if self.in_bfloat16 == "copies":
            return out * 2
        return out.mul_(2) if self.in_bfloat16 == "writes" else torch.as_tensor(self.narrow(out))


@pytest.mark.parametrize("in_bfloat16", ["copies", "writes", "goes on"])
def test_the_module_that_gives_the_main_output_in_the_reference_alone(
    in_bfloat16: Literal["copies", "writes", "goes on"],
) -> None:
    torch.manual_seed(0)
    module, x = Head(in_bfloat16).eval(), torch.randn(300, 32)
    session = de.open(module, inputs=[{"x": x}])
    reference = module.head(module.first(x))
    session.cast("*", "bfloat16")
    found = {each.name: each for each in session.drift().modules}["head"]
    with torch.no_grad():
        candidate = module.head(module.first(x.bfloat16()))
    if in_bfloat16 == "writes":  # what it gave is lost
        assert found.sqnr_db is None
        return
    assert found.sqnr_error_db > 0
    assert found.sqnr_db == pytest.approx(sqnr(reference, candidate), abs=3 * found.sqnr_error_db)
