"""Weights whose effect no gradient shows: their scores against plain torch with values made by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers import architectures
from torch import nn
from torch.nn import functional

import dtype_engine as de
from dtype_engine.results.drift import SQUARED
from dtype_engine.runtime.scan import measured_weights
from dtype_engine.runtime.scan.scan import Scan


class Uses(nn.Module):
    """A weight between two layers; a function or a subclass says how it is used."""

    def __init__(self, use: Use | None = None) -> None:
        super().__init__()
        self.use = use
        torch.manual_seed(0)
        self.first, self.last, self.inner = (nn.Linear(8, 8) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.unused = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.middle(torch.tanh(self.first(x))))
        return result

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        assert self.use is not None
        return self.use(self, x)


Use = Callable[[Uses, torch.Tensor], torch.Tensor]


def writes_through_data(own: Uses, x: torch.Tensor) -> torch.Tensor:
    own.weight.data.mul_(0.5)
    return own.inner(functional.linear(x, own.weight))


def sets_data(own: Uses, x: torch.Tensor) -> torch.Tensor:
    own.weight.data = functional.normalize(own.weight.data, dim=1)
    return functional.linear(x, own.weight, own.inner.bias)


def writes_one_into_another(own: Uses, x: torch.Tensor) -> torch.Tensor:
    own.inner.weight.copy_(own.weight.T @ own.weight)
    return own.inner(x)


def makes_a_parameter(own: Uses, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, nn.Parameter(own.weight * 2)) + functional.linear(x, nn.Parameter(own.weight))


def copies(own: Uses, x: torch.Tensor) -> torch.Tensor:
    return copy.deepcopy(own.inner)(x) + functional.linear(x, copy.deepcopy(own.weight)) + own.inner(x)


def without_gradients(own: Uses, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = own.weight.mean(0) * own.inner.bias
    return x * scale + functional.linear(x, own.weight).sin()


def reads(own: Uses, x: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(own.weight.tolist())
    return x @ table + own.inner(x) * own.inner.bias[0].item()


def fills(own: Uses, x: torch.Tensor) -> torch.Tensor:
    table = torch.zeros(8, 8)
    table[:4] = own.weight[:4]
    table[4:] = own.weight[4:]
    return x @ table


def uses_complex_numbers(own: Uses, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(own.weight[0]), n=8)


def chooses(own: Uses, x: torch.Tensor) -> torch.Tensor:
    return own.inner(x) * own.weight.argmax() + (own.weight > 0).float().mean()


def maps(own: Uses, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.mul, (None, 0))(own.inner(x), own.weight).sum(0)


def detaches(own: Uses, x: torch.Tensor) -> torch.Tensor:
    """Activations reach the output detached from the graph, and attached as well."""
    with torch.no_grad():
        apart = torch.tanh(x @ own.weight)
    return own.inner(x) + 2 * x.detach() + x.data.sin() + apart


def copies_values(own: Uses, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, own.weight) + torch.from_numpy(own.inner(x).detach().numpy()).cos()


class TakesAGradient(Uses):
    """The output is a gradient with respect to activations, as forces are of an energy."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            start = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(start), start)
        return x + slope

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)).square().sum()


class TakesAGradientOfItsOwn(TakesAGradient):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.func.grad(self.energy)(x)


class GoesBackward(TakesAGradient):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            start = x.detach().clone().requires_grad_()
            self.energy(start).backward()
        assert start.grad is not None
        return x + start.grad


def renorms(own: Uses, x: torch.Tensor) -> torch.Tensor:
    """A look-up rescales rows of the table, which is read before and afterwards."""
    before = own.weight.detach().sum()
    rows = functional.embedding(IDS, own.weight, max_norm=1.0)
    return own.inner(x) * rows + before * 0.1 + functional.linear(x, own.weight)


def renorms_twice(own: Uses, x: torch.Tensor) -> torch.Tensor:
    first = functional.embedding(IDS[:2], own.weight, max_norm=2.0).sum(0)
    rows = functional.embedding_bag(IDS[:, None], own.weight, max_norm=1.0)
    return own.inner(x) * rows + first @ own.weight.T


def renorms_a_view(own: Uses, x: torch.Tensor) -> torch.Tensor:
    return own.inner(x) * functional.embedding(IDS, own.weight[:6], max_norm=1.0) @ own.weight


def renorms_detached(own: Uses, x: torch.Tensor) -> torch.Tensor:
    torch.embedding_renorm_(own.weight.detach(), IDS, 1.0, 2.0)
    return own.inner(x) * functional.embedding(IDS, own.weight) @ own.weight


def assigns_in_place(own: Uses, x: torch.Tensor) -> torch.Tensor:
    before = functional.linear(x, own.weight)
    own.weight *= 0.5
    return own.inner(before) @ own.weight


class WritesAPart(Uses):
    """Writes to rows of a weight and to a bias, which were used before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = functional.linear(x, self.weight)
        self.weight[:4].mul_(0.5)
        return super().forward(before)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        before = self.inner(x)
        nn.init.constant_(self.inner.bias, 0.3)
        return self.inner(before) @ self.weight


def writes_to_out(own: Uses, x: torch.Tensor) -> torch.Tensor:
    before = functional.linear(x, own.weight)
    torch.mul(own.weight, 0.5, out=own.weight)
    functional.relu(own.inner.weight, inplace=True)
    return own.inner(before) @ own.weight


def writes_from_activations(own: Uses, x: torch.Tensor) -> torch.Tensor:
    own.weight.mul_(own.inner(x).abs().mean())
    return functional.linear(x, own.weight)


def writes_activations_to_out(own: Uses, x: torch.Tensor) -> torch.Tensor:
    torch.mul(own.weight, own.inner(x).abs().mean(), out=own.weight)
    return functional.linear(x, own.weight)


def writes_activations_to_rows(own: Uses, x: torch.Tensor) -> torch.Tensor:
    own.weight[:4].copy_(own.inner(x)[:4])
    return functional.linear(x, own.weight)


def sets_activations(own: Uses, x: torch.Tensor) -> torch.Tensor:
    own.weight.data = own.inner(x).T @ x
    return functional.linear(x, own.weight)


class Standardizes(Uses):
    """Standardizes a weight in place, and divides another by its norm, which power iterations in a buffer estimate."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("u", torch.ones(8))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.sub_(self.weight.mean(1, keepdim=True))
        self.weight.div_(self.weight.std(1, keepdim=True))
        v = functional.normalize(self.inner.weight.T @ self.u, dim=0)
        self.u.copy_(functional.normalize(self.inner.weight @ v, dim=0))
        norm = self.u @ self.inner.weight @ v
        return functional.linear(x, self.inner.weight / norm, self.inner.bias) @ self.weight


KINDS = [
    detaches, copies_values, TakesAGradient, TakesAGradientOfItsOwn, GoesBackward, writes_through_data, sets_data,
    writes_one_into_another, makes_a_parameter, copies, without_gradients, reads, fills, uses_complex_numbers, chooses, maps,
    renorms, renorms_twice, renorms_a_view, renorms_detached, assigns_in_place, WritesAPart, writes_to_out,
    writes_from_activations, writes_activations_to_out, writes_activations_to_rows, sets_activations, Standardizes,
]  # fmt: skip
INPUTS = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([3, 0, 3, 5, 1])


def made(kind: type[Uses] | Use) -> Uses:
    return kind() if isinstance(kind, type) else Uses(kind)


@torch.no_grad()
def by_hand(kind: type[Uses] | Use, name: str) -> float:
    """The squared relative error of the output with one weight in int8, in plain torch."""
    reference = made(kind).requires_grad_(False)(INPUTS).double()
    module = made(kind).requires_grad_(False)
    values = module.state_dict(keep_vars=True)[name]
    rows = values if values.ndim == 2 else values[None]
    scales = rows.abs().amax(1, keepdim=True) / 127
    values.data = ((rows / scales).round() * scales).reshape(values.shape)
    return float((module(INPUTS).double() - reference).square().sum() / reference.square().sum())


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_score_of_a_weight_without_a_gradient_equals_plain_torch(kind: type[Uses] | Use) -> None:
    session = de.open(made(kind), inputs=(INPUTS,))
    before = {name: tensor.clone() for name, tensor in session.model.module.state_dict().items()}
    report = session.scan(["int8"], draws=200)
    assert report.unit == SQUARED
    scores = report.scores()
    for name, tensor in session.model.module.state_dict().items():
        assert scores[name, "int8"] == pytest.approx(by_hand(kind, name), rel=0.35, abs=1e-13), name
        assert torch.equal(tensor, before[name]), "a scan writes to no weight"
    assert scores["unused", "int8"] == 0


def writes_a_part_afterwards(own: Uses, x: torch.Tensor) -> torch.Tensor:
    before = functional.linear(x, own.weight)
    own.weight[:4].mul_(0.5)
    return before @ own.weight


def test_scan_refuses_a_write_to_weight_rows_that_a_gradient_needs() -> None:
    session = de.open(Uses(writes_a_part_afterwards), inputs=(INPUTS,))
    with pytest.raises(de.NoForward, match=r"modified by an inplace operation.*scan --exact"):
        session.scan(["int8"], draws=4)
    scores = session.scan(["int8"], exact=True).scores()
    assert scores["weight", "int8"] == pytest.approx(by_hand(writes_a_part_afterwards, "weight"), rel=1e-4)


def test_scan_refuses_too_many_weights_without_gradient_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    session = de.open(Uses(reads), inputs=(INPUTS,))
    monkeypatch.setattr(measured_weights, "MOST_PASSES", 1)
    with pytest.raises(de.UserError, match=r"such as [\w.]+, act on the output without a gradient.*scan --exact"):
        session.scan(["int8"])


class ChecksValues(Uses):
    """Refuses to run with values that are not finite, and counts large ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.parameters():
            if not torch.isfinite(weight).all():
                raise ValueError
        return super().forward(x)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * int((self.weight > self.weight.max() * 0.9995).sum())


def test_scan_adds_no_pass_for_checks_of_weights_that_casts_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    session = de.open(ChecksValues(), inputs=(INPUTS,))
    monkeypatch.setattr(measured_weights, "MOST_PASSES", 3)
    scores = session.scan(["int8"], draws=200).scores()
    for name in session.model.weights:
        assert scores[name, "int8"] == pytest.approx(by_hand(ChecksValues, name), rel=0.35, abs=1e-13), name
    assert by_hand(ChecksValues, "weight") == 0
    weight = session.model.module.weight.data
    row, column = divmod(int(weight.argmax()), 8)
    weight[row, column - 1] = weight.max() * 0.999
    counted = de.open(session.model.module, inputs=(INPUTS,)).scan(["int8"], draws=4).scores()
    assert counted["weight", "int8"] > 0.1, "in int8, two values are the largest"


def checks_and_uses(own: Uses, x: torch.Tensor) -> torch.Tensor:
    """Multiplies by a weight, and by a number that depends on how many of its values are the largest."""
    largest = int((own.weight > own.weight.max() * 0.9995).sum())
    return (own.inner(x) + x @ own.weight) * largest


def test_scan_measures_a_weight_whose_check_by_the_model_a_cast_changes() -> None:
    model = Uses(checks_and_uses)
    weight = model.weight.data
    row, column = divmod(int(weight.argmax()), 8)
    weight[row, column - 1] = weight.max() * 0.999
    session = de.open(model, inputs=(INPUTS,))
    scores = session.scan(["int8"], draws=4).scores()
    exact = session.scan(["int8"], exact=True).scores()
    assert exact["weight", "int8"] > 0.1, "in int8, two values are the largest"
    assert scores["weight", "int8"] == pytest.approx(exact["weight", "int8"], rel=1e-6)


def test_scan_needs_one_pass_for_all_unused_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    session = de.open(Uses(fills), inputs=(INPUTS,))
    casts: list[dict[str, str]] = []
    made = measured_weights.CastWeightsMode.__init__

    def counted(self: Any, weights: Any, device: Any, cast: Any, errors: Any) -> None:
        casts.append(cast)
        made(self, weights, device, cast, errors)

    monkeypatch.setattr(measured_weights.CastWeightsMode, "__init__", counted)
    scores = Scan(session.model, session.inputs, ("int8",), draws=4).run().scores()
    (cast,) = casts
    assert set(cast) == {name for (name, dtype), score in scores.items() if dtype == "int8" and not score}
    assert set(cast) == {"inner.weight", "inner.bias", "unused"}


class Unused(nn.Module):
    """Layers of which only two have a part in the output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = [layer(x) for layer in self.layers]
        return x + hidden[3] + torch.from_numpy(hidden[7].detach().numpy())


@pytest.mark.parametrize("budget", [1 << 20, 512])
def test_scan_finds_weights_with_effect_among_many_without(budget: int) -> None:
    """In one case, the memory has room for one cast weight only."""
    session = de.open(Unused(), inputs=(INPUTS,))
    scan = Scan(session.model, session.inputs, ("int8",), draws=200, budget=budget).run().scores()
    exact = session.scan(["int8"], exact=True).scores()
    assert {name for (name, dtype), score in scan.items() if dtype == "int8" and score} == {
        f"layers.{number}.{each}" for number in (3, 7) for each in ("weight", "bias")
    }
    for each in ("weight", "bias"):
        assert scan[f"layers.7.{each}", "int8"] == pytest.approx(exact[f"layers.7.{each}", "int8"], rel=1e-6)


@pytest.mark.parametrize("name", ["torch_lstm", "torch_gru"])
def test_scan_scores_an_embedding_in_front_of_a_recurrent_layer(name: str) -> None:
    module, inputs = architectures.make(name)
    session = de.open(module, inputs=inputs)
    table = next(name for name, tensor in session.tree.tensors.items() if "embed" in name)
    scan, exact = (session.scan(["bfloat16"], **how).scores() for how in ({"draws": 4}, {"exact": True}))
    assert scan[table, "bfloat16"] == pytest.approx(exact[table, "bfloat16"], rel=1e-3)


def test_weight_without_gradient_is_tried_in_the_narrowest_dtype() -> None:
    """The stored format is among the dtypes, since a weight may round to 16 bits. The format's number of bits is unknown here."""
    tried: list[Any] = []
    weight = SimpleNamespace(info=SimpleNamespace(numel=1))
    errors: Any = SimpleNamespace(budget=100, weights={"w": weight})

    def drift(casts: Any) -> float:
        tried.append(casts)
        return 0.0

    costly = {"w": ("gguf:q8_0", "bfloat16", "int8")}
    assert not measured_weights.measure_unfollowed(drift, costly, (), (), errors)
    assert tried == [{"w": "int8"}]
