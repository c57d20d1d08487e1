"""Modules compared in some sequences, against plain torch over those and over all; and passes that watch few modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.helpers import architectures
from torch import nn

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.results.drift import ModuleDrift
from dtype_engine.runtime.measure.drift import DriftMeter, running_order
from dtype_engine.runtime.measure.modules.module_sample import ModuleSample, compared_sequences, outline
from dtype_engine.runtime.measure.modules.module_totals import ModuleTotal, module_drifts
from dtype_engine.runtime.measure.modules.row_comparison import ModuleSums
from dtype_engine.runtime.measure.running_totals import Measurement

DECIBELS = 10 / math.log(10)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([7], {0}),
        ([5, 5], {1}),
        ([5, 5, 5, 5], {1}),
        ([5] * 10, {1, 5, 9}),
        ([1, 5, 500, 500], {1, 2}),  # the second alone would say little
    ],
)
def test_a_quarter_of_all_positions_but_the_firsts_is_compared(sizes: list[int], expected: set[int]) -> None:
    chosen = compared_sequences(range(len(sizes)), sizes)
    assert chosen == expected
    assert 4 * sum(sizes[number] for number in chosen) >= sum(sizes[1:])


def test_large_calls_are_looked_into_and_small_ones_are_not() -> None:
    """Twelve blocks of five calls each, in a body, after an embedding and before a head."""
    finished, spans = ["embed"], [0]
    for block in range(12):
        began = len(finished)
        for part in ("norm", "up", "act", "down"):
            spans.append(len(finished))
            finished.append(f"body.{block}.{part}")
        spans.append(began)
        finished.append(f"body.{block}")
    spans += [1, len(finished) + 1]
    finished += ["body", "head"]
    assert outline(finished, spans) == {"embed", "body", "head", *(f"body.{block}" for block in range(12))}
    assert outline(finished, spans[:-1]) == set(finished)  # of calls whose spans are not known nothing is left out


def test_what_no_compared_sequence_called_is_compared_elsewhere_and_stays_so() -> None:
    sample = ModuleSample(frozenset({2, 3}), 4, ["a", "b", "c", "d", "e"])
    assert (sample.compared_in(4), sample.watched_in(4)) == (frozenset(), None)  # it shows which there are
    sample.note(4, ["a", "d"], [0, 0])
    assert sample.watched_in(4) == {"a", "d"}
    sample.note(2, ["a", "b"], [0, 0])
    assert (sample.compared_in(2), sample.watched_in(2)) == (None, None)
    assert sample.compared_in(0) == {"c", "d", "e"}
    assert sample.watched_in(0) == {"a", "c", "d", "e"}
    sample.note(3, ["a", "c"], [0, 0])
    assert (sample.compared_in(0), sample.compared_in(1)) == ({"c", "d", "e"}, {"d", "e"})
    assert [sample.called_by_the_first_alone() for _ in range(2)] == [True, False]
    assert sample.compared_in(4) == {"d"}


def figure(energies: Sequence[float], noises: Sequence[float], compared: int, left: int) -> ModuleDrift:
    total = ModuleTotal()
    for number, (energy, noise) in enumerate(zip(energies, noises, strict=True)):
        total.add(ModuleSums(energy, noise), number < compared)
    return module_drifts({"module": total}, left)[0]


def test_the_error_is_that_of_the_sequences_in_which_a_module_was_not_compared() -> None:
    energies, noises = [4.0, 6.0], [0.08, 0.06]
    mean = sum(noises) / sum(energies)
    squares = sum((energy / 5 * (noise / energy - mean)) ** 2 for energy, noise in zip(energies, noises, strict=True))
    variance = (
        3 * (0.3 * mean) ** 2 + squares
    ) / 4  # the measured one, and one stated beforehand with the weight of three
    for left, error in ((0, 0.0), (6, DECIBELS * math.sqrt(variance * 6 / (8 * 2)) / mean)):
        found = figure(energies, noises, 2, left)
        assert found.sqnr_db == pytest.approx(-10 * math.log10(mean))
        assert found.sqnr_error_db == pytest.approx(error)
    # Compared in all that are left as well, as the main output is: nothing is open.
    assert figure(energies, noises, 1, 1).sqnr_error_db == 0
    assert figure([4.0], [0.0], 1, 3).sqnr_error_db == 0
    assert figure([4.0], [math.inf], 1, 3).sqnr_error_db == 0


def by_hand(module: nn.Module, cast: nn.Module, inputs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The SQNR of each module's output over these inputs, in dB, from forward hooks and float64."""
    outputs: list[dict[str, list[torch.Tensor]]] = []
    for each in (module, cast):
        found: dict[str, list[torch.Tensor]] = {}
        handles = [
            child.register_forward_hook(lambda _, __, out, name=name, found=found: note(found, name, out))  # type: ignore[misc]
            for name, child in each.named_modules()
            if name
        ]
        with torch.no_grad():
            for given in inputs:
                each(**given)
        for handle in handles:
            handle.remove()
        outputs.append(found)
    reference, candidate = outputs
    figures = {}
    for name in reference:
        r, c = (torch.cat([tensor.double().flatten() for tensor in found[name]]) for found in (reference, candidate))
        figures[name] = float(20 * torch.log10(r.norm() / (c - r).norm()))
    return figures


def note(found: dict[str, list[torch.Tensor]], name: str, output: Any) -> None:
    first = (
        output
        if isinstance(output, torch.Tensor)
        else next(iter(output.values() if isinstance(output, dict) else output))
    )
    found.setdefault(name, []).append(first.clone())


def several(count: int, length: int = 6) -> list[dict[str, torch.Tensor]]:
    """Texts of one length, so that the first of them is run first."""
    draw = torch.Generator().manual_seed(1)
    return [
        {"input_ids": torch.randint(3, architectures.VOCABULARY, (1, length), generator=draw)} for _ in range(count)
    ]


def test_figures_are_those_of_the_sequences_that_were_compared() -> None:
    inputs = several(4)
    session = de.open(architectures.make("llama")[0], inputs=inputs)
    session.cast("*", "bfloat16")
    module = architectures.make("llama")[0]
    cast = architectures.make("llama")[0]
    for parameter in cast.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    second = running_order(session.need_inputs().batches)[1]
    of_one, of_all = by_hand(module, cast, [inputs[second]]), by_hand(module, cast, inputs)
    sampled = {each.name: each for each in session.drift().modules}
    exact = {each.name: each for each in session.drift(modules_in_full=lambda: True).modules}
    assert set(sampled) == set(exact)
    for name, each in sampled.items():
        head = name == "lm_head"
        assert each.sqnr_db == pytest.approx((of_all if head else of_one)[name], abs=1e-3)
        assert (each.sqnr_error_db == 0) == (head or math.isinf(of_one[name]))
        assert exact[name].sqnr_db == pytest.approx(of_all[name], abs=1e-3)
        assert exact[name].sqnr_error_db == 0


def test_two_errors_hold_in_nine_of_ten_modules() -> None:
    """Over models and recipes together: modules of one model err together."""
    within = []
    for name in ("llama", "gpt2", "phi3"):
        session = de.open(architectures.make(name)[0], inputs=several(6, 24))
        for rules in ([Rule("*", "bfloat16")], [Rule("*", "float8_e4m3fn")], [Rule("re:.*(k_proj|c_attn)", "int8")]):
            session.apply(Recipe(tuple(rules)))
            exact = {each.name: each.sqnr_db for each in session.drift(modules_in_full=lambda: True).modules}
            session._meter = None
            for each in session.drift().modules:
                if each.sqnr_error_db:
                    assert each.sqnr_db is not None
                    within.append(abs(each.sqnr_db - (exact[each.name] or 0.0)) <= 2 * each.sqnr_error_db)
    assert len(within) > 100
    assert sum(within) >= 0.9 * len(within)


class Routes(nn.Module):
    """Examples go to the expert that their first value names; three layers follow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.experts[int(x[0, 0])](x)
        for layer in self.layers:
            x = layer(x)
        return x


def routed(*experts: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(2)
    inputs = [torch.randn(4, 8, generator=draw) for _ in experts]
    for x, expert in zip(inputs, experts, strict=True):
        x[0, 0] = expert
    return [{"x": x} for x in inputs]


def test_a_module_that_only_other_sequences_call_is_compared_in_them() -> None:
    inputs = routed(0, 1, 1, 2)  # in the order 0, 3, 2, 1
    session = de.open(Routes().eval(), inputs=inputs)
    session.cast("*", "bfloat16")
    sample = DriftMeter(session.model, session.inputs)._sample  # type: ignore[arg-type]
    assert (sample.compared, sample.first) == ({3}, 0)
    cast = Routes().eval().to(torch.bfloat16)
    for _ in range(2):  # the second time from what is kept
        found = {each.name: each for each in session.drift().modules}
        for expert, numbers in ((0, [0]), (1, [1, 2]), (2, [3])):
            x = torch.cat([inputs[number]["x"] for number in numbers])
            with torch.no_grad():
                r, c = Routes().eval().experts[expert](x).double(), cast.experts[expert](x.bfloat16()).double()
            wanted = float(20 * torch.log10(r.norm() / (c - r).norm()))
            assert found[f"experts.{expert}"].sqnr_db == pytest.approx(wanted, abs=1e-3)


class Counting(nn.Linear):
    runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.runs += 1
        return super().forward(x)


def test_sequences_that_are_not_compared_are_reused_as_others_are() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(Counting(8, 8), nn.ReLU(), Counting(8, 8)) for _ in range(20)))
    session = de.open(module, inputs=[{"input": torch.randn(2, 8)} for _ in range(4)])
    session.drift()
    for cast, runs in (("19", 2), ("15", 10)):
        session.apply(Recipe((Rule(cast, "bfloat16"),)))
        Counting.runs = 0
        assert session.drift().seconds.reused
        assert Counting.runs == 4 * runs


@pytest.mark.parametrize("kept", [1 << 30, 0])
def test_casts_back_and_forth_are_measuring_in_full(kept: int) -> None:
    """Over sequences of which one is compared, and others come another way."""
    for module, inputs in ((architectures.make("llama")[0], several(5)), (Routes().eval(), routed(0, 1, 2, 0, 1, 1))):
        session = de.open(module, inputs=inputs)
        assert session.inputs is not None
        quick = DriftMeter(session.model, session.inputs, budget=kept)
        names = [name for name, tensor in session.tree.tensors.items() if tensor.castable and tensor.persistent]
        for rules in (
            [], [Rule(names[-1], "bfloat16")], [Rule(names[0], "bfloat16")], [Rule("*", "bfloat16")], [Rule(names[-2], "int8")],
            [Rule("*", "float16"), Rule(names[len(names) // 2], "float32")], [Rule("*", "float16")], [],
        ):  # fmt: skip
            session.apply(Recipe(tuple(rules)))
            found, full = quick.measure(), DriftMeter(session.model, session.inputs, reuse=False).measure()
            assert found.output == full.output
            assert {each.name: each for each in found.modules} == {each.name: each for each in full.modules}
    for child in module.modules():
        assert not child._forward_hooks
        assert not child._forward_pre_hooks


class Grows(nn.Module):
    """Keeps a table for inputs up to the longest it has seen, in the dtype of its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
        self.table = torch.linspace(0, 1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > len(self.table):
            self.table = torch.linspace(0, 1, len(x)).to(self.layers[0].weight.dtype)
        x = x + self.table[: len(x), None].to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_a_longer_input_changes_in_the_model_is_put_back() -> None:
    session = de.open(Grows().eval(), inputs=[{"x": torch.randn(rows, 8)} for rows in (3, 5, 3, 3)])
    assert session.inputs is not None
    meter = DriftMeter(session.model, session.inputs)
    assert 1 not in meter._sample.compared
    session.cast("*", "bfloat16")
    meter.measure()
    assert len(session.model.module.table) == 4  # type: ignore[arg-type]
    session.undo()
    assert meter.measure().output.max_abs == 0


def test_a_measurement_under_way_has_the_error_of_what_is_to_come() -> None:
    session = de.open(architectures.make("llama")[0], inputs=several(4))
    session.cast("*", "bfloat16")
    assert session.inputs is not None
    readings: list[Measurement] = []
    DriftMeter(session.model, session.inputs).measure(on_reading=lambda each: readings.append(each.measurement()))
    heads = [next(each for each in found.modules if each.name == "lm_head") for found in readings]
    assert [each.sqnr_db for each in heads] == [pytest.approx(found.output.sqnr_db) for found in readings]
    first, *_, last = [each.sqnr_error_db for each in heads]
    assert first > 0.5
    assert last == 0


def test_a_measurement_that_ends_early_has_modules() -> None:
    """The first sequence is not compared, whatever precision is enough."""
    session = de.open(architectures.make("llama")[0], inputs=several(5))
    session.cast("*", "bfloat16")
    assert session.inputs is not None
    found = DriftMeter(session.model, session.inputs).measure(enough=lambda extent: True)
    assert found.extent.done == 2
    assert len(found.modules) > 10


def test_the_main_output_is_not_kept_for_the_next_pass_and_others_are() -> None:
    """Nothing runs after the logits, and they are the largest output of a model with a large vocabulary."""
    session = de.open(architectures.make("llama")[0], inputs=several(4))
    session.cast("*.q_proj.weight", "bfloat16")
    assert session.inputs is not None
    meter = DriftMeter(session.model, session.inputs)
    meter.measure()
    classes = session.model.module.config.vocab_size  # type: ignore[union-attr]
    for trace, _ in meter._traces.values():
        kept = {call.module: call.versions for call in trace.calls if call.versions}
        assert any("layers" in module for module in kept)
        assert all(tensor.shape[-1] != classes for versions in kept.values() for tensor, _ in versions)
    session.cast("model.layers.1.mlp.down_proj.weight", "float16")
    assert meter.measure().reused
    fresh = DriftMeter(session.model, session.inputs, reuse=False).measure()
    assert meter.measure().output == fresh.output


def test_a_head_called_more_than_once_is_kept() -> None:
    sample = ModuleSample(frozenset({1}), 0, ["head", "body"])
    sample.note(0, ["head", "body", "head"], [0, 1, 2], ["head"])
    assert sample.kept == {"head", "body"}
    sample.note(0, ["body", "head"], [0, 1], ["head"])
    assert sample.kept == {"body"}
    assert sample.outline == {"head", "body"}
