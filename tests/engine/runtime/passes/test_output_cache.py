"""Outputs that are reused for an unchanged prefix are those, bit for bit, that running it would give."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import pytest
import torch
from tests.helpers import architectures
from torch import nn
from transformers.utils import ModelOutput

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.core.cancellation import never
from dtype_engine.runtime.measure.drift import DriftMeter
from dtype_engine.runtime.measure.running_totals import RunningTotals
from dtype_engine.runtime.numerics.compare.metrics import OutputMetrics
from dtype_engine.runtime.passes.forward_pass import ModuleObserver
from dtype_engine.runtime.passes.one_pass import PassOptions
from dtype_engine.runtime.passes.runner import ForwardRunner


def meter(session: Any) -> DriftMeter:
    return DriftMeter(session.model, session.inputs)


def in_full(meter: DriftMeter) -> RunningTotals:
    """Measure without reusing outputs of the candidate's last pass."""
    meter._caches.clear()
    return meter.measure()


def check_reuse(quick: DriftMeter, full: DriftMeter, case: object = None) -> None:
    reusing, anew = quick.measure(), in_full(full)
    assert reusing.output == anew.output, case
    assert {m.name: m for m in reusing.modules} == {m.name: m for m in anew.modules}, case


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every candidate output that was compared with a reference."""
    outputs: list[torch.Tensor] = []
    add = OutputMetrics.add

    def noting(self: OutputMetrics, reference: torch.Tensor, candidate: torch.Tensor, *more: Any) -> None:
        outputs.append(candidate.clone())
        add(self, reference, candidate, *more)

    monkeypatch.setattr(OutputMetrics, "add", noting)
    return outputs


def steps(session: Any, uniform: bool) -> list[Recipe]:
    """Casts back and forth: of some weights, ever earlier ones, or of all weights, and of all but one."""
    weights = [name for name, tensor in session.tree.tensors.items() if tensor.castable and tensor.persistent]
    late, middle, early = weights[-1], weights[len(weights) * 2 // 3], weights[0]
    if uniform:
        return [
            Recipe(),
            Recipe((Rule("*", "bfloat16"),)),
            Recipe((Rule("*", "bfloat16"), Rule(late, "float32"))),
            Recipe((Rule("*", "bfloat16"), Rule(early, "float32"))),
            Recipe(),
        ]
    return [
        Recipe(),
        Recipe((Rule(late, "bfloat16"),)),
        Recipe((Rule(late, "bfloat16"), Rule(middle, "float16"))),
        Recipe((Rule(middle, "float16"),)),
        Recipe((Rule(middle, "float8_e4m3fn"), Rule(late, "float64"))),
    ]


@pytest.mark.parametrize(("place", "name"), list(enumerate(architectures.ZOO)), ids=architectures.ZOO)
def test_drift_with_reused_outputs_equals_a_full_measurement(
    place: int, name: str, compared: list[torch.Tensor]
) -> None:
    """Architectures of a family follow each other, and have uniform recipes and others in turn."""
    module, inputs = architectures.make(name)
    session = de.open(module, inputs=inputs)
    quick, full = meter(session), meter(session)
    for recipe in steps(session, place % 2 == 0):
        session.apply(recipe)
        check_reuse(quick, full)
        assert torch.equal(compared[-2], compared[-1])
    # Both meters ran the reference once for all steps: another one, with what is left of the casts, gives the same.
    session.apply(Recipe((Rule("*", "bfloat16"),)))
    assert meter(session).measure().output == in_full(full).output == quick.measure().output


class Counting(nn.Linear):
    runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.runs += 1
        return super().forward(x)


def test_only_modules_after_the_changed_one_are_run_again() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(Counting(8, 8), nn.ReLU()) for _ in range(10)))
    session = de.open(module, inputs=(torch.randn(2, 8),))
    session.drift()
    session.cast("9.0", "bfloat16")
    Counting.runs = 0
    session.drift()
    assert Counting.runs == 1
    session.cast("5.0", "bfloat16")
    Counting.runs = 0
    session.drift()
    assert Counting.runs == 5


class Routed(nn.Module):
    """Examples go to the experts that their first values name, so passes over others have other calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(Counting(8, 8) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.late = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routes = x[0, :4].tolist()
        for expert, route in zip(self.experts, routes, strict=True):
            x = x + expert(x) if route > 0 else x
        for layer in self.layers:
            x = layer(x)
        return self.late(x) if routes[0] > 0 else x


ROUTES = ([1, 1, 1, 1], [-1, -1, -1, -1], [-1, 1, -1, -1])


def routed() -> Any:
    inputs = [{"x": torch.cat([torch.tensor([route] * 2) * 9.0, torch.ones(2, 4)], 1)} for route in ROUTES]
    return de.open(Routed(), inputs=inputs)


def test_outputs_are_reused_if_changed_routing_calls_other_modules() -> None:
    session = routed()
    quick, full = meter(session), meter(session)
    for pattern in ("layers.2", "layers.1", "layers.0", "experts.3", "experts.1", "late", "layers.2"):
        session.apply(Recipe((Rule(pattern, "bfloat16"),)))
        with_stand_ins = quick.measure()
        assert with_stand_ins.output == in_full(full).output
    assert with_stand_ins.seconds.reused


def test_outputs_from_before_a_cast_are_reused_after_the_cast_changes_the_routing() -> None:
    session = routed()
    session.drift()
    session.cast("layers.0", "bfloat16")
    Counting.runs = 0
    session.drift()
    assert Counting.runs == 0


def test_causes_are_right_if_casts_change_the_routing() -> None:
    session = routed()
    session.cast("*", "bfloat16")
    found = {cause.name: cause.drift for cause in session.causes().causes}
    assert set(found) == {
        "late",
        *(f"experts.{number}" for number in range(4)),
        *(f"layers.{number}" for number in range(3)),
    }
    for name, drift in found.items():
        session.apply(Recipe((Rule(name, "bfloat16"),)))
        assert drift == pytest.approx(meter(session).measure().output.rel_l2 ** 2, rel=1e-6), name


class Layers(nn.Module):
    """Three layers; a subclass says how they are called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))


class OtherOrder(Layers):
    """Which of its first two layers comes first depends on the example."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = (self.first, self.middle) if x[0, 0] > 0 else (self.middle, self.first)
        for layer in (*order, self.last):
            x = layer(x)
        return x


class Again(Layers):
    """Calls one layer before and after another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(self.middle(self.first(x))))


class TiedOtherOrder(nn.Module):
    """Two layers have one weight; which of them comes before the middle one depends on the example."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.middle, self.last = (nn.Linear(8, 8) for _ in range(4))
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = (self.middle, self.a, self.b) if x[0, 0] > 0 else (self.b, self.middle, self.a)
        for layer in (*order, self.last):
            x = layer(x)
        return x


class Gate(nn.Module):
    """Gives its weight, which is above 1, but not in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1 + 2**-9]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight + 0 * x[0, 0]


class Gated(nn.Module):
    """The order of two layers depends on a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate = Counting(8, 8), Gate()
        self.a, self.b, self.last = Counting(8, 8), Counting(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        order = (self.a, self.b) if self.gate(x) > 1 else (self.b, self.a)
        for layer in (*order, self.last):
            x = layer(x)
        return x


class Peeks(Layers):
    """Takes values of its last layer's weight before that is called, for some examples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, x = x, self.first(x.to(self.first.weight.dtype))
        x = x * self.last.weight[0] if given[0, 0] > 0 else x
        return self.last(self.middle(x))


class Reads(Layers):
    """Looks at a later module's weight before that module is called, as T5 and CLIP do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.middle(x.to(self.last.weight.dtype))
        return self.last(x)


class AsksForSize(Reads):
    """Asks how many bytes a value of a later module's weight has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.middle(x * 1.5 if self.last.weight.element_size() < 4 else x))


@pytest.mark.parametrize("model", [OtherOrder, Again, TiedOtherOrder, Gated, Peeks, Reads, AsksForSize])
@pytest.mark.parametrize(("stored", "signs"), [(torch.float32, (1, -1)), (torch.float16, (-1, 1))])
def test_drift_with_reused_outputs_is_right_if_a_later_weight_is_read_or_the_order_changes(
    model: type[nn.Module], stored: torch.dtype, signs: tuple[int, int]
) -> None:
    chance = torch.Generator().manual_seed(1)
    inputs = [{"x": sign * torch.rand(2, 8, generator=chance)} for sign in signs]
    module = model().to(stored)
    session = de.open(module, inputs=inputs)
    quick, full = meter(session), meter(session)
    for names in permutations(dict(module.named_children()), 2):
        for count in range(3):
            session.apply(Recipe(tuple(Rule(name, "bfloat16") for name in names[:count])))
            check_reuse(quick, full, names[:count])


def test_candidate_pass_with_another_routing_than_the_reference_is_reused() -> None:
    session = de.open(Gated(), inputs=(torch.rand(2, 8),))
    session.cast("gate", "bfloat16")
    session.drift()
    session.cast("last", "bfloat16")
    Counting.runs = 0
    output = session.drift().output
    assert Counting.runs == 0
    assert output == meter(session).measure().output


class Scaled(nn.Module):
    """Five layers, the same activation after each, and a weight of its own, used last or after the first layer."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Counting(8, 8) for _ in range(5))
        self.activation = nn.ReLU()
        self.scale = nn.Parameter(torch.rand(8))
        self.at = 4 if last else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = self.activation(layer(x))
            if number == self.at:
                x = x * self.scale
        return x


@pytest.mark.parametrize(
    ("last", "cast", "runs"),
    [(True, "scale", 0), (False, "scale", 4), (True, "layers.4", 1), (True, "layers.2", 3)],
)
def test_layers_before_the_first_use_of_a_cast_weight_are_reused(last: bool, cast: str, runs: int) -> None:
    session = de.open(Scaled(last), inputs=(torch.randn(2, 8),))
    session.drift()
    session.cast(cast, "bfloat16")
    Counting.runs = 0
    output = session.drift().output
    assert Counting.runs == runs
    assert output == meter(session).measure().output


class WritesLater(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden += 1
        return self.last(hidden)


@dataclass
class Named(ModelOutput):
    hidden: torch.Tensor  # no default: a class that can't be called without it


class GivesNamed(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Wraps()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.first(x)).hidden)


class Wraps(nn.Module):
    def forward(self, x: torch.Tensor) -> Named:
        return Named(hidden=x.tanh())


def test_outputs_of_custom_classes_are_reused() -> None:
    session = de.open(GivesNamed(), inputs=(torch.randn(2, 8),))
    session.drift()
    session.cast("last", "bfloat16")
    found = session.drift()
    assert found.seconds.reused
    assert found.output == meter(session).measure().output


def test_overwritten_output_is_not_reused() -> None:
    session = de.open(WritesLater(), inputs=(torch.randn(2, 8),))
    session.drift()
    session.cast("last", "bfloat16")
    quick = session.drift().output
    assert quick == meter(session).measure().output


def test_modules_are_unchanged_after_a_pass_with_reused_outputs() -> None:
    module, inputs = architectures.make("llama")
    session = de.open(module, inputs=inputs)
    session.drift()
    session.cast("lm_head", "bfloat16")
    session.drift()
    for child in module.modules():
        assert "forward" not in child.__dict__
        assert not child._forward_hooks
        assert not child._forward_pre_hooks


class Listened(nn.Module):
    """Hooks of its own: one changes what a layer returned, one takes what a layer inside another is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8)
        self.given: list[torch.Tensor] = []
        self.first.register_forward_hook(lambda module, args, output: output * 2 + 1)
        self.block[1].register_forward_pre_hook(lambda module, args: self.given.append(args[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.given.clear()
        x = self.block(self.first(x))
        return self.last(x + self.given[0].sum(0))


def test_hooks_of_the_model_are_called_in_passes_with_reused_outputs() -> None:
    session = de.open(Listened(), inputs=[{"x": torch.randn(rows, 8)} for rows in (2, 3)])
    quick, full = meter(session), meter(session)
    for name in ("first", "last", "first", "block"):
        for rules in ((), (Rule(name, "bfloat16"),), (Rule(name, "bfloat16"), Rule("last", "float16"))):
            session.apply(Recipe(rules))
            check_reuse(quick, full, rules)


def test_modules_with_hooks_of_the_model_are_run_again() -> None:
    # A vision tower whose hidden states transformers collects with hooks on its layers.
    module, inputs = architectures.make("llava")
    session = de.open(module, inputs=inputs)
    session.drift()
    session.cast("model.vision_tower.post_layernorm", "bfloat16")
    reused = session.drift().output
    session.undo()
    session.drift()
    session.cast("model.language_model", "bfloat16")
    partly = session.drift()
    for pattern, found in (("model.vision_tower.post_layernorm", reused), ("model.language_model", partly.output)):
        again, _ = architectures.make("llava")
        fresh = de.open(again, inputs=inputs)
        fresh.cast(pattern, "bfloat16")
        assert fresh.drift().output == found


def test_output_cache_keeps_only_outputs_of_selected_modules() -> None:
    """For other modules, the cache keeps that they ran and what was observed. Observers get this again."""
    module = nn.Sequential(nn.Sequential(Counting(8, 8), nn.ReLU()), Counting(8, 8), nn.Linear(8, 8))
    session = de.open(module, inputs=(torch.randn(2, 8),))
    (batch,) = session.need_inputs().batches

    class Reads(ModuleObserver):
        def __init__(self) -> None:
            self.found: list[tuple[str, object]] = []

        def __call__(self, module: str, call: int, output: torch.Tensor) -> str:
            self.found.append((module, f"read of {module}"))
            return f"read of {module}"

        def replay(self, module: str, observed: object) -> None:
            self.found.append((module, observed))

    with ForwardRunner(session.model, session.settings, never) as runner:
        call, options = runner.candidate_call(batch), PassOptions(cached=frozenset({"0"}), cache_bytes=1 << 20)
        runner.reference(runner.reference_call(batch), PassOptions(learns=True))
        first = runner.candidate(call, options, before := Reads())
        assert first.cache is not None
        assert first.finished == ["0.0", "0.1", "0", "1", "2"]
        assert [each.module for each in first.cache.calls if each.usable] == ["0"]
        session.cast("2", "float16")
        Counting.runs = 0
        runner.candidate(call, replace(options, earlier=first.cache), after := Reads())
        assert Counting.runs == 1  # "1", whose output was not kept
        other = runner.candidate(call, options).cache
        assert other is not None
        assert other.nbytes > 0
        session.cast("0", "float16")
        runner.candidate(call, replace(options, earlier=other))
        assert (other.nbytes, other.calls) == (0, [])  # nothing before "0": its memory is free for this pass
    assert after.found == before.found
