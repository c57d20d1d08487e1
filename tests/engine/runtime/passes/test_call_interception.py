"""How a pass learns of the calls of modules."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dtype_engine as de
from dtype_engine.core.errors import Cancelled, NoForward
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.passes.call_interception import ModuleCalls
from dtype_engine.runtime.passes.forward_pass import ForwardPass
from dtype_engine.runtime.passes.output_cache import OutputCache


class Adds(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        return x + times * self.number


class Parent(nn.Module):
    """Calls a child as a module, another by its `forward` too, and asks what arguments the third takes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = Adds(1.0), Adds(2.0), Adds(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(self.two.forward(self.one(x)))
        return self.three(x, **({"times": 2} if "times" in inspect.signature(self.three.forward).parameters else {}))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parent = Parent()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parent(x)


class Seen:
    """An observer that keeps what it was given."""

    def __init__(self) -> None:
        self.outputs: list[tuple[str, int, float]] = []

    def __call__(self, module: str, call: int, output: torch.Tensor) -> None:
        self.outputs.append((module, call, float(output)))

    def replay(self, module: str, observed: Any) -> None:
        raise AssertionError("nothing is reused")


OUTPUTS = [("parent.one", 0, 1.0), ("parent.two", 0, 5.0), ("parent.three", 0, 11.0), ("parent", 0, 11.0)]


def run(
    model: nn.Module,
    watched: frozenset[str] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[list[tuple[str, int, float]], list[str], list[int]]:
    """Run the model. Returns the observed outputs, the finished modules, and how many had finished when each call began."""
    calls, seen = ModuleCalls(model, cancelled), Seen()
    mode = WeightMode({}, torch.device("cpu"))
    under_way = ForwardPass(mode, seen, OutputCache({}, 0), {}, None, {}, watched)
    calls.intercept(reports=True)
    calls.under_way = under_way
    try:
        model(torch.zeros(()))
    finally:
        calls.under_way = None
        calls.remove()
    return seen.outputs, under_way.finished, under_way.spans


def test_calls_are_reported_in_the_order_of_completion() -> None:
    """A direct call of `forward` does not count as a call of the module, as for hooks."""
    assert run(Model()) == (OUTPUTS, [name for name, *_ in OUTPUTS], [0, 1, 2, 0])


def test_outputs_of_unwatched_modules_are_not_reported() -> None:
    outputs, finished, _ = run(Model(), watched=frozenset({"parent.two"}))
    assert outputs == [OUTPUTS[1]]
    assert finished == [name for name, *_ in OUTPUTS]


def test_module_output_is_reported_as_changed_by_another_hook() -> None:
    model = Model()
    model.parent.two.register_forward_hook(lambda module, args, output: output * 10)
    assert run(model)[0][1] == ("parent.two", 0, 50.0)


def test_modules_are_unchanged_after_an_intercepted_pass() -> None:
    model = Model()
    before = [dict(vars(module)) for module in model.modules()]
    run(model)
    assert [vars(module) for module in model.modules()] == before


def test_custom_forward_of_an_instance_is_called() -> None:
    model = Model()
    own = model.parent.one.forward = lambda x: x + 100.0
    assert run(model)[0][0] == ("parent.one", 0, 100.0)
    assert model.parent.one.forward is own


class KeepsAll(Adds):
    """Has a state of its own making: all attributes."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


@pytest.mark.parametrize("kind", [Adds, KeepsAll])
def test_copied_module_runs_its_own_forward(kind: type[Adds]) -> None:
    class Copies(Parent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            copied = copy.deepcopy(self.one)
            copied.number = 50.0
            return copied(x)

    model = Model()
    model.parent = Copies()
    model.parent.one = kind(1.0)
    assert run(model)[0][-1] == ("parent", 0, 50.0)


@pytest.mark.parametrize("forward", [staticmethod(lambda x: x + 100.0), torch.exp])
def test_forward_that_is_no_method_is_called(forward: Any) -> None:
    model = Model()
    model.parent.one = type("Function", (nn.Module,), {"forward": forward})()
    assert run(model)[0][0] == ("parent.one", 0, float(model.parent.one(torch.zeros(()))))


def test_forward_replaced_during_the_pass_is_kept() -> None:
    class Replaces(Adds):
        def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
            self.forward = self.faster
            return super().forward(x, times)

        def faster(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
            return super().forward(x, times)

    model = Model()
    model.parent.one = Replaces(1.0)
    for _ in range(2):
        assert run(model)[0] == OUTPUTS
        assert model.parent.one.forward == model.parent.one.faster


def test_compiled_module_stays_compiled() -> None:
    def ends(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it is called as it was before it was compiled")

    model = Model()
    model.parent.one._compiled_call_impl = ends  # as `Module.compile` leaves it
    assert run(model)[0] == OUTPUTS
    assert model.parent.one._compiled_call_impl is ends


def test_two_observers_can_intercept_the_same_modules() -> None:
    model = Model()
    other = ModuleCalls(model, lambda: False)
    other.intercept(reports=True)
    assert run(model)[0] == OUTPUTS
    assert float(model(torch.zeros(()))) == OUTPUTS[-1][2]
    other.remove()
    assert "_compiled_call_impl" not in vars(model.parent)


def test_pass_is_cancelled_between_two_modules() -> None:
    calls: list[int] = []

    def cancelled() -> bool:
        calls.append(1)
        return len(calls) > 2

    with pytest.raises(Cancelled):
        run(Model(), cancelled=cancelled)
    assert len(calls) == 3


@pytest.mark.parametrize("mixed", [False, True])
def test_out_of_memory_error_names_the_module(mixed: bool) -> None:
    """In a plain pass, and in one under a mode."""

    class Full(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.weight.dtype == torch.bfloat16:
                raise torch.OutOfMemoryError("no memory. And much more.")
            return super().forward(x)

    session = de.open(nn.Sequential(nn.Linear(4, 4), nn.Sequential(Full(4, 4))), inputs=(torch.ones(2, 4),))
    session.cast("1.*" if mixed else "*", "bfloat16")
    with pytest.raises(NoForward, match=r"^1\.0: not enough memory on \S+ \(no memory\)"):
        session.drift()
