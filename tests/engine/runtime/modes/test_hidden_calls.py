"""Calls that a `TorchFunctionMode` does not see, or whose effect it can't see, against plain torch with values made by hand."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest
import torch
from tests.helpers.measured_on import placed
from torch import nn
from torch.nn import functional

import dtype_engine as de


def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * gate)


class Scripted(nn.Module):
    """Gives a weight to a function that TorchScript runs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.function = torch.jit.script(gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function(x, self.gate)
        return result + self.bias


class Mapped(nn.Module):
    """Calls a module inside of `torch.vmap`, and writes in place there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def row(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x).clone()
        y *= 2
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(self.row)(x)


class Renormed(nn.Module):
    """Looks up rows that are brought to a norm first, in the table itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(9, 8, max_norm=1.0)
        self.many = nn.EmbeddingBag(9, 8, max_norm=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x.argsort().long()
        rows: torch.Tensor = self.one(ids).sum(1).float()
        return rows + self.many(ids).float()


class MapsItsWeight(nn.Module):
    """Gives weights to `torch.vmap`, as an ensemble does, also beside one that is not mapped."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.randn(5, 8))
        self.rows, self.shared = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = torch.vmap(torch.mul)(self.gates, x)
        both = torch.vmap(torch.vmap(torch.mul, (None, 0)), (0, None))  # every row with every gate
        return (
            gated + both(self.rows, self.shared.expand(3, 8)).sum(1) + torch.vmap(torch.mul, (0, None))(x, self.shared)
        )


class Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))


class WrapsItsWeight(Vectors):
    """Makes other tensors of the same memory, with calls that no mode sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.two.dtype)
        stored = empty.set_(self.two.untyped_storage(), 0, (8,))
        return x * nn.Parameter(self.one, requires_grad=False) + stored


class WritesToAList(Vectors):
    """Writes to several weights with one call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._foreach_mul_([self.one, self.two], 0.5)
        return x * self.one + self.two


class WritesInPlace(nn.Module):
    """Writes to weights by an operator that assigns its result, by `nn.init`, by an argument `inplace`, and into `out`."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Parameter(torch.randn(8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x * self.two
        self.one *= 0.5
        nn.init.constant_(self.two, 0.3)
        functional.relu(self.three, inplace=True)
        torch.mul(self.four, 0.5, out=self.four)
        return before * self.one + self.two * self.three + self.four


class RenormsDetached(nn.Module):
    """Brings the rows of a table to a norm as `nn.Embedding` does, and reads the table afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.embedding_renorm_(self.table.detach(), x.argsort(), 1.0, 2.0)
        return x + self.table[:5].float()


class RenormsRows(RenormsDetached):
    """Brings rows of a part of a table to a norm, and reads the whole table afterwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.embedding(x[:, :5].argsort(), self.table[:6], max_norm=1.0).sum(1) + self.table[:5].float()


class WritesToAWrapped(Vectors):
    """Writes to another tensor of the memory of a weight, which a mode does not see made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nn.Parameter(self.one, requires_grad=False).mul_(0.5)
        return x * self.one + self.two


class AsksForType(nn.Module):
    """Asks torch what a weight and integers are promoted to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.linear.weight.to(torch.result_type(self.linear.weight, x.argsort())))


WITH_HIDDEN_WEIGHTS = [MapsItsWeight, WrapsItsWeight, WritesToAList]
WRITING = [Renormed, RenormsDetached, RenormsRows, WritesInPlace, WritesToAWrapped]


def fp8(tensor: torch.Tensor) -> torch.Tensor:
    """A weight's values in float8_e4m3fn with one scale a row; one for all of a vector."""
    scales = tensor.abs().amax(-1, keepdim=True) / 448
    return (tensor / scales).to(torch.float8_e4m3fn).float() * scales


def int8(tensor: torch.Tensor) -> torch.Tensor:
    """A weight's values in int8 with one scale a row, as a Python loop; one for all of a vector."""
    rows = tensor if tensor.ndim == 2 else tensor[None]
    scales = [float(row.abs().max()) / 127 for row in rows]
    kept = torch.stack([(row / scale).round() * scale for row, scale in zip(rows, scales, strict=True)])
    return kept.reshape(tensor.shape)


@pytest.mark.parametrize("kind", [Mapped, AsksForType, *WRITING, *WITH_HIDDEN_WEIGHTS])
def test_drift_through_calls_hidden_from_torch_function_equals_plain_torch(kind: type[nn.Module]) -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))

    def made(cast: str = "float32") -> nn.Module:
        torch.manual_seed(0)
        module = kind().requires_grad_(False)
        for parameter in module.parameters():
            parameter.data = int8(parameter.data) if cast == "int8" else parameter.data.to(getattr(torch, cast))
        return placed(module)

    session = de.open(made(), inputs=(x,))
    reference = made()(x).cpu().double()
    for dtype in ("int8", "float16", "int8", "float32"):
        session.cast("*", dtype)
        try:
            expected = made(dtype)(x).cpu().double() - reference
        except RuntimeError:  # plain torch refuses float32 rows and float16 weights
            continue
        output = session.drift().output
        assert output.max_abs == pytest.approx(float(expected.abs().max()), abs=1e-6)
        assert output.mean_abs == pytest.approx(float(expected.abs().mean()), abs=1e-6)
        assert (dtype == "float32") == (output.max_abs == 0)
    for name, tensor in session.model.module.state_dict().items():
        assert torch.equal(tensor, made().state_dict()[name]), "a measurement writes to no weight"


@pytest.mark.parametrize("cast", [fp8, int8])
@pytest.mark.parametrize("kind", WRITING)
def test_weight_that_requires_a_gradient_and_is_written_keeps_the_written_values(
    kind: type[nn.Module], cast: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))

    def made() -> nn.Module:
        torch.manual_seed(0)
        return placed(kind())

    session = de.open(made(), inputs=(x,))
    session.cast("*", cast.__name__)
    by_hand = made()
    for parameter in by_hand.parameters():
        parameter.data = cast(parameter.data)
    with torch.no_grad():
        reference = made()(x).double()
        error = by_hand(x).double() - reference
    expected = float(error.norm() / reference.norm())
    assert session.drift().output.rel_l2 == pytest.approx(expected, rel=1e-4)
    exact = session.scan([cast.__name__], exact=True)
    dtype = {"fp8": "float8_e4m3fn"}.get(cast.__name__, cast.__name__)
    for name in by_hand.state_dict():
        module = made()
        module.state_dict()[name].copy_(cast(module.state_dict()[name]))
        with torch.no_grad():
            error = module(x).double() - reference
        squared = float(error.square().sum() / reference.square().sum())
        assert exact.scores()[name, dtype] == pytest.approx(squared, rel=1e-3), name


@pytest.mark.parametrize("kind", [*WITH_HIDDEN_WEIGHTS, *WRITING])
def test_reference_of_weights_in_hidden_calls_is_in_float32(kind: type[nn.Module]) -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))

    def made(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        return kind().requires_grad_(False).to(torch.bfloat16).to(dtype)

    session = de.open(made(torch.bfloat16), inputs=(x,))
    session.cast("*", "float32")
    assert session.drift().output.max_abs == 0
    session.cast("*", "bfloat16")
    expected = made(torch.bfloat16)(x).double() - made(torch.float32)(x).double()
    assert session.drift().output.max_abs == pytest.approx(float(expected.abs().max()), rel=1e-6)


class Differentiates(nn.Module):
    """Computes the gradient with respect to a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gradient: torch.Tensor = torch.func.grad(lambda gate: (x * gate).square().sum())(self.gate)
        return x * gradient


def test_cast_weight_of_which_the_model_takes_a_gradient_is_refused_by_name() -> None:
    session = de.open(Differentiates(), inputs=(torch.randn(5, 8),))
    assert session.drift().output.max_abs == 0
    session.cast("gate", "fp8")
    for dtype in ("fp8", "int8"):  # torch itself refuses a gradient with respect to integers
        session.cast("gate", dtype)
        with pytest.raises(de.NoForward, match=r"gives gate to [\w.]+ in a way .* only with this weight in float32"):
            session.drift()


class InAPool(nn.Module):
    """Runs two layers at once."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(2) as pool:
            one, two = pool.map(lambda layer: layer(x), [self.one, self.two])
        return one + two


POOL = ThreadPoolExecutor(1)
POOL.submit(int).result()  # its thread runs before any pass


class InAPoolOfItsOwn(InAPool):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return POOL.submit(self.one, x).result() + self.two(x)


class InAThread(InAPool):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        thread = Thread(target=lambda: found.append(self.one(x)))
        thread.start()
        thread.join()
        return self.two(x) + found[0]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # Python itself is silent about SystemExit
@pytest.mark.parametrize("kind", [InAPool, InAPoolOfItsOwn, InAThread])
def test_cast_weight_used_in_another_thread_is_refused_by_name(
    kind: type[nn.Module], capfd: pytest.CaptureFixture[str]
) -> None:
    session = de.open(kind(), inputs=(torch.randn(5, 8),))
    session.cast("*.weight", "int8")
    for measure in (session.drift, session.scan):
        with pytest.raises(de.NoForward, match=r"the model uses (one|two)\.weight in another thread .* forward call"):
            measure()
    assert "Traceback" not in capfd.readouterr().err


class MultipliesInAThread(InAPool):
    """Uses a weight in another thread without a call of its module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return POOL.submit(torch.mul, x, self.one.bias).result() + self.two(x)


def test_report_names_cast_weights_that_no_call_used() -> None:
    session = de.open(MultipliesInAThread(), inputs=(torch.randn(5, 8),))
    session.cast("two.*", "bfloat16")
    assert not any("another thread" in notice for notice in session.drift().notices)
    session.cast("*", "bfloat16")
    (notice,) = [notice for notice in session.drift().notices if "another thread" in notice]
    assert notice.startswith("2 cast weights (one.bias, ...) in no call of the pass: ")


class WorksInAThread(InAPool):
    """Another thread has no part in what the weights do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = POOL.submit(torch.mul, x, 0.5)
        return self.one(x) + self.two(half.result())


def test_threads_that_use_no_cast_weights_are_allowed() -> None:
    session = de.open(WorksInAThread(), inputs=(torch.randn(5, 8),))
    session.cast("*.weight", "int8")
    assert 20 < session.drift().output.sqnr_db < 80
    assert POOL.submit(torch.mul, session.model.module.one.weight.float(), 2.0).result().shape == (8, 8)


class MixedInside(nn.Module):
    """Runs a linear layer whose bias has another dtype: plainly, which torch refuses, and inside of `torch.vmap`, where it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.many = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda weight: functional.linear(x, weight, self.linear.bias))(self.many).sum(0)


def test_dtypes_that_torch_refuses_are_tried_again_inside_vmap() -> None:
    x = torch.randn(5, 8)

    class Plain(MixedInside):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    for kind in (Plain, MixedInside):
        session = de.open(kind(), inputs=(x,))
        session.cast("linear.bias", "bfloat16")
        found = session.drift().output
    by_hand = session.model.module  # its bias is in bfloat16 now
    narrow = by_hand(x).double()
    by_hand.linear.bias.data = session.model.weights["linear.bias"].stored.read()
    assert found.max_abs == pytest.approx(float((narrow - by_hand(x).double()).abs().max()), rel=1e-6)


class UsesDetached(nn.Module):
    """Runs layers with tensors that torch does not take for their weights or for views of these."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three = self.layers
        x = torch.func.functional_call(one, dict(one.state_dict()), (x,)).float()
        x = functional.linear(x, two.weight.data, two.bias.data).float()
        return functional.linear(x, three.weight.detach(), three.bias.detach()).float()


def test_input_is_cast_to_the_dtype_of_a_detached_weight() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 8)
    session = de.open(UsesDetached(), inputs=(x,))
    session.cast("*", "bfloat16")
    found = session.drift().output
    narrow, wide = x, x
    for index, layer in enumerate(session.model.module.cpu().layers):  # in bfloat16 now
        weight, bias = (session.model.weights[f"layers.{index}.{name}"].stored.read() for name in ("weight", "bias"))
        narrow = functional.linear(narrow.bfloat16(), layer.weight, layer.bias).float()
        wide = functional.linear(wide, weight, bias)
    assert found.mean_abs == pytest.approx(float((narrow - wide).abs().mean()), rel=1e-4)


class Ensemble(nn.Module):
    """Runs one layer with the weights of each member, as the tutorial on model ensembling does."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda weight: functional.linear(x, weight))(self.members).float().sum(0)


def test_input_is_cast_to_the_dtype_of_a_weight_inside_vmap() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 8)
    session = de.open(Ensemble(), inputs=(x,))
    session.cast("*", "bfloat16")
    found = session.drift().output
    members = session.model.module.members.cpu()  # in bfloat16 now
    by_hand = torch.stack([functional.linear(x.bfloat16(), weight) for weight in members]).float().sum(0)
    stored = session.model.weights["members"].stored.read()
    error = by_hand - torch.stack([functional.linear(x, weight) for weight in stored]).sum(0)
    assert found.mean_abs == pytest.approx(float(error.abs().mean()), rel=0.05)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_int8_weight_that_only_torchscript_uses_is_refused_by_name() -> None:
    session = de.open(Scripted(), inputs=(torch.randn(5, 8),))
    assert session.drift().output.max_abs == 0
    session.cast("bias", "int8")
    assert session.drift().output.max_abs > 0
    session.cast("gate", "int8")
    with pytest.raises(de.NoForward, match=r"functions of TorchScript such as gated, .* leave gate as stored, or let"):
        session.drift()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_estimated_scan_scores_a_weight_that_torchscript_uses() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 8)
    session = de.open(Scripted(), inputs=(x,))
    gate, bias = (session.model.weights[name].stored.read() for name in ("gate", "bias"))
    reference, candidate = gated(x, gate) + bias, gated(x, int8(gate)) + bias
    expected = float((candidate - reference).square().sum() / reference.square().sum())
    assert session.scan(["int8"], draws=300).scores()["gate", "int8"] == pytest.approx(expected, rel=1e-4)
