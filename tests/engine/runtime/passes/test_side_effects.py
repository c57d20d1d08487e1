"""Models whose modules do more than return an output: re-measuring gives what a new session gives, and so do causes."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional

import dtype_engine as de
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.numerics.quantize import values_in

WIDTH = 8
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


class Layers(nn.Module):
    """Three linear layers and a head; a subclass says how they are called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(4))


class InPlace(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.one(x))
        self.act(y)
        return self.head(self.two(y) + y)


class Adds(nn.Module):
    """Writes to what it is given, and returns nothing."""

    def forward(self, x: torch.Tensor) -> None:
        x.add_(1.0)


class ReturnsNothing(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.add = Adds()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x) * 2
        self.add(y)
        return self.head(self.two(y))


class Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, shared: Any = None) -> torch.Tensor:
        y = self.linear(x)
        if isinstance(shared, dict):
            shared["kept"] = (y,)
        else:
            shared.append(y)
        return x + 1


class SharesInDict(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.fills = Fills()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared: dict[str, Any] = {}
        y = self.fills(self.one(x), shared=shared)
        return self.head(self.two(y) + shared["kept"][0])


class SharesInList(SharesInDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared: list[torch.Tensor] = []
        y = self.fills(self.one(x), shared)
        return self.head(self.two(y) + shared[0])


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.linear(x)
        return x


class KeepsOnItself(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.keeps = Keeps()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.keeps(self.one(x))
        return self.head(self.two(y) + self.keeps.kept)


class WritesItsBuffer(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.copy_(self.one(x).mean(0))
        return self.head(self.two(x) + self.mean)


class Seeds(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return x + torch.rand_like(x)


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class DrawsNumbers(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.seeds, self.draws = Seeds(), Draws()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.draws(self.two(self.draws(self.seeds(self.one(x))))))


class CallsForward(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one.forward(x + 1)
        return self.head(self.two(self.one(x)) + y)


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear(x)
        raise ValueError("not this one")


class Tries(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.raises = Raises()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        try:
            x = self.raises(x)
        except ValueError:
            x = self.two(x)
        return self.three(x)


class CatchesAnError(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.tries = Tries()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.tries(self.one(x)))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self) -> torch.Tensor:
        return self.weight


class ReturnsItsWeight(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.table()
        return self.head(functional.linear(self.two(self.one(x)), table))


class Turned(Table):
    def forward(self) -> torch.Tensor:
        return self.weight.t()


class ReturnsAView(ReturnsItsWeight):
    """What another weight of its own, in float64, makes of it depends on whether it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Turned()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.table()
        return self.head(functional.linear(self.two(self.one(x)), table).to(x.dtype))


class TakesGradients(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        with torch.enable_grad():
            y = y.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(torch.tanh(self.two(y)).sum(), y)
        return self.head(self.three(y + slope))


class WithoutCounting(Layers):
    """Runs in `torch.inference_mode`, in which torch does not count writes to tensors."""

    @torch.inference_mode()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.two(self.one(x)))


class PartlyWithoutCounting(Layers):
    """Outputs are compared within the part that runs in inference mode, and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = WithoutCounting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.part(x))
        for _ in range(9):
            x = torch.tanh(self.one(x))
        return self.head(x)


class Packs(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.nested.nested_tensor([x, x[:1]]), x.to_sparse()


class PassesNestedAndSparse(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.packs = Packs()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nested, sparse = self.packs(self.one(x).float())
        both = nested.to_padded_tensor(0.0).sum(0) + sparse.to_dense()
        return self.head(self.two(both.to(x.dtype)))


MODELS: tuple[type[Layers], ...] = (
    InPlace,
    ReturnsNothing,
    SharesInDict,
    SharesInList,
    KeepsOnItself,
    WritesItsBuffer,
    DrawsNumbers,
    CallsForward,
    CatchesAnError,
    ReturnsItsWeight,
    ReturnsAView,
    TakesGradients,
    WithoutCounting,
    PartlyWithoutCounting,
    PassesNestedAndSparse,
)
DTYPES = ("float32", "bfloat16")


def opened(module: nn.Module) -> Any:
    inputs = [{"x": torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))} for rows in (2, 3, 5)]
    return de.open(deepcopy(module), inputs=inputs, options=de.Options(modules="exact"))


def figures(session: Any) -> tuple[str, list[str]]:
    report = session.drift()
    return str(report.output), [str(module) for module in report.modules]


def stored_in(make: Callable[[], nn.Module], dtype: str) -> nn.Module:
    return make().eval().to(getattr(torch, dtype))


CASES = [
    pytest.param(make, DTYPES[place % 2], id=f"{make.__name__}-{DTYPES[place % 2]}")
    for place, make in enumerate(MODELS)
]
"""The dtypes take turns: what a model does besides its output does not depend on the dtype of its weights."""


def test_outputs_of_a_module_that_caught_an_error_are_reused() -> None:
    session = opened(stored_in(CatchesAnError, "float32"))
    figures(session)
    session.cast("head", "bfloat16")
    assert session.drift().seconds.reused


@pytest.mark.parametrize(("make", "stored"), CASES)
def test_repeated_drift_of_a_stateful_model_equals_that_of_a_new_session(
    make: Callable[[], nn.Module], stored: str
) -> None:
    module = stored_in(make, stored)
    session = opened(module)
    figures(session)
    names = [name for name, child in module.named_modules() if list(child.parameters(recurse=False))]
    for pattern, dtype in [
        *((name, "float16") for name in reversed(names)),
        ("head", "int8"),
        ("one", "float64"),
        ("two", stored),
    ]:
        session.cast(pattern, dtype)
        anew = opened(module)
        anew.apply(session.recipe)
        assert figures(session) == figures(anew), (pattern, dtype)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_causes_of_a_stateful_model_equal_those_of_single_casts(make: Callable[[], nn.Module]) -> None:
    module = stored_in(make, "float32")
    session = opened(module)
    session.cast("head", "bfloat16")
    session.cast("one", "float16")
    causes = {cause.name: cause.drift for cause in session.causes().causes}
    assert causes
    for name, dtype in (("head", "bfloat16"), ("one", "float16")):
        alone = opened(module)
        alone.apply(Recipe((Rule(name, dtype),)))
        (only,) = [cause.drift for cause in alone.causes().causes if cause.name == name]
        assert causes[name] == pytest.approx(only, rel=1e-6)


class ReplacesItsBuffer(Layers):
    """As CTRL does with the sines of its positions: in the dtype of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sines", torch.rand(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        self.sines = self.sines.to(y.dtype)
        return self.head(self.two(y + self.sines))


class GoesOn(Layers):
    """Keeps what it has seen for the next call, as a stream does."""

    hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x).mean(0)
        self.hidden = y if self.hidden is None else y + self.hidden
        return self.head(self.two(x) + self.hidden)


class GoesOnInATuple(Layers):
    """As a recurrent model keeps both of its states."""

    hidden: tuple[torch.Tensor, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x).mean(0)
        self.hidden = (y, y) if not self.hidden else (y + self.hidden[0], y)
        return self.head(self.two(x) + self.hidden[0])


class Counts(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 0.5
        return self.head(self.two(self.one(x) * (1 + self.seen)))


class Collects(Layers):
    """Keeps what it has seen in a container of its own."""

    def __init__(self, seen: Any) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = list(self.seen.values() if isinstance(self.seen, dict) else self.seen)
        y = self.one(x).mean(0) + sum(before)
        if isinstance(self.seen, dict):
            self.seen[len(self.seen)] = y.detach()
        elif isinstance(self.seen, set):
            self.seen.add(len(self.seen) + 1)
        else:
            self.seen.append(y.detach())
        return self.head(self.two(x) + y)


class Deep(Layers):
    """Keeps a tensor in a list within a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = [[torch.ones(WIDTH)]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen[0].append(self.one(x).mean(0).detach())
        return self.head(self.two(x) + self.seen[0][-2])


class WritesItsAttribute(Layers):
    """Keeps a tensor that is no buffer, and writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"sum": torch.ones(WIDTH)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["sum"][:4] += self.one(x).mean(0)[:4]
        return self.head(self.two(x) + self.seen["sum"])


class Holds:
    """An object that is no module."""


class KeepsInAnObject(Layers):
    """Makes a tensor of a weight when it is first called, and keeps it in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.holds: Any = Holds()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self.holds, "turned"):
            self.holds.turned = self.one.weight.float().t().softmax(0)
        return self.head(self.two(x) @ self.holds.turned.to(x.dtype))


class MakesABuffer(Layers):
    """Makes a buffer of a weight when it is first called, and remembers that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.register_buffer("turned", self.one.weight.float().t().softmax(0), persistent=False)
            self.ready = True
        return self.head(self.two(x) @ self.turned.to(x.dtype))


class Rescales(Layers):
    """Divides weights in place when it is first called: itself, through `data` and through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.rescaled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.rescaled:
            with torch.no_grad():
                self.one.weight.div_(3)
                self.two.weight.data.mul_(0.7)
                self.three.weight[2:].mul_(0.5)
                self.head.weight.data = self.head.weight.data / 5
            self.rescaled = True
        return self.head(self.three(torch.relu(self.two(torch.relu(self.one(x))))))


class Merges(Layers):
    """Puts another parameter in the place of one, as what merges an adapter does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "three"):
            self.one.weight = nn.Parameter(self.one.weight + self.three.weight.to(self.one.weight.dtype))
            del self.three
        return self.head(self.two(self.one(x)))


def keeps_in_its_class() -> nn.Module:
    """Makes tensors of a weight when it is first called, and keeps them in its class. Each model has a class of its own."""

    class KeepsInItsClass(Layers):
        turned: torch.Tensor | None = None
        scaled: ClassVar[dict[str, torch.Tensor]] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kind = type(self)
            if kind.turned is None:
                kind.turned = self.one.weight.float().t().softmax(0)
                self.scaled["one"] = self.one.weight.float() * 0.5
            return self.head((self.two(x).float() @ (kind.turned + self.scaled["one"])).to(x.dtype))

    return KeepsInItsClass()


@functools.lru_cache(maxsize=4)
def softmax_of(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (weight.float().t().softmax(0),)


class Turns(Layers):
    """Multiplies activations by a matrix that it makes of a weight once. A subclass says where it is kept."""

    def turned(self) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.two(x).float() @ self.turned()).to(x.dtype))


class CachesInAFunction(Turns):
    def turned(self) -> torch.Tensor:
        return softmax_of(self.one.weight)[0]


class CachesInAProperty(Turns):
    @property
    @functools.cache  # noqa: B019
    def matrix(self) -> torch.Tensor:
        return self.one.weight.float().t().softmax(0)

    def turned(self) -> torch.Tensor:
        return self.matrix


class CachesInAnAttribute(Turns):
    def __init__(self) -> None:
        super().__init__()
        self.get = functools.cache(lambda: self.one.weight.float().t().softmax(0))

    def turned(self) -> torch.Tensor:
        return self.get()


class CachesInAClosure(Turns):
    def __init__(self) -> None:
        super().__init__()
        kept: list[torch.Tensor] = []

        def get() -> torch.Tensor:
            if not kept:
                kept.append(self.one.weight.float().t().softmax(0))
            return kept[0]

        self.turned = get  # type: ignore[method-assign]


def caches_in_a_default() -> nn.Module:
    """Each model has a function of its own."""

    class CachesInADefault(Turns):
        def turned(self, kept: list[torch.Tensor] = []) -> torch.Tensor:  # noqa: B006
            if not kept:
                kept.append(self.one.weight.float().t().softmax(0))
            return kept[0]

    return CachesInADefault()


CHANGE_THEMSELVES = [
    KeepsInAnObject, MakesABuffer, Rescales, Merges, keeps_in_its_class, CachesInAFunction, CachesInAProperty,
    CachesInAnAttribute, CachesInAClosure, caches_in_a_default,
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "int8"])
@pytest.mark.parametrize("make", CHANGE_THEMSELVES, ids=lambda make: make.__name__)
def test_tensors_derived_from_weights_follow_the_cast(make: Callable[[], nn.Module], dtype: str) -> None:
    """The figures are those of modules whose own tensors are cast before their first pass."""
    given = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    by_hand = make().eval()
    for tensor in by_hand.parameters():
        tensor.data = values_in(tensor.data, dtype, torch.float32)
    with torch.no_grad():
        expected = make().eval()(given).double()
        if dtype == "bfloat16":
            by_hand.two.register_forward_pre_hook(lambda module, args: args[0].to(module.weight.dtype))
            by_hand.head.register_forward_pre_hook(lambda module, args: args[0].to(module.weight.dtype))
        found = by_hand(given.to(next(by_hand.parameters()).dtype)).double()
    sqnr = 10 * math.log10(float(expected.square().sum() / (found - expected).square().sum()))
    for measured_before in (False, True):
        session = de.open(make(), inputs=(given,))
        if measured_before:
            assert session.drift().output.sqnr_db == math.inf
        session.cast("*", dtype)
        assert session.drift().output.sqnr_db == pytest.approx(sqnr, rel=1e-6)
        session.undo()
        assert session.drift().output.sqnr_db == math.inf


_KEPT: dict[str, torch.Tensor] = {}
_NUMBERS = {"passes": 0}


class KeepsInAGlobal(Layers):
    """Makes a tensor of a weight when it is first called, and keeps it in a global variable. Counts its passes in another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _NUMBERS["passes"] += 1
        if not _KEPT:
            _KEPT["turned"] = self.one.weight.t().softmax(0)
        return self.head(self.two(x) @ _KEPT["turned"])


def test_tensors_that_a_model_caches_in_globals_are_recomputed_in_each_pass() -> None:
    given = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    module, by_hand = KeepsInAGlobal().requires_grad_(False), KeepsInAGlobal().requires_grad_(False)
    expected = by_hand(given).double()
    _KEPT.clear()
    by_hand.one.weight.data = values_in(by_hand.one.weight.data, "int8", torch.float32)
    difference = (by_hand(given).double() - expected).abs().max()
    _KEPT.clear()
    session = de.open(module, inputs=(given,))
    assert session.drift().output.max_abs == 0
    session.cast("one.weight", "int8")
    passes = _NUMBERS["passes"]
    assert session.drift().output.max_abs == pytest.approx(float(difference), rel=1e-6)
    assert not _KEPT
    assert _NUMBERS["passes"] > passes, "variables without tensors stay as the model leaves them"


MAKE_KEEPERS: dict[str, Callable[[], nn.Module]] = {
    "buffer": ReplacesItsBuffer,
    "tensor": GoesOn,
    "tuple": GoesOnInATuple,
    "number": Counts,
    "list in a list": Deep,
    "attribute written to": WritesItsAttribute,
    "object": KeepsInAnObject,
    "buffer made": MakesABuffer,
    "weights written to": Rescales,
    "parameter replaced": Merges,
    "class": keeps_in_its_class,
    "list": lambda: Collects([torch.ones(WIDTH)]),
    "dict": lambda: Collects({0: torch.ones(WIDTH)}),
    "set": lambda: Collects({1}),
    "deque": lambda: Collects(deque([torch.ones(WIDTH)], maxlen=3)),
}


@pytest.mark.parametrize("make", MAKE_KEEPERS.values(), ids=MAKE_KEEPERS)
def test_state_of_a_model_does_not_carry_over_to_the_next_pass(make: Callable[[], nn.Module]) -> None:
    session = opened(stored_in(make, "float32"))
    before = figures(session)
    assert session.drift().output.sqnr_db == math.inf
    session.cast("*", "bfloat16")
    assert figures(session) == figures(session) != before
    session.undo()
    assert figures(session) == before


class WritesToItsInput(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2).add_(1)
        return self.head(self.two(self.one(x)))


def test_inputs_that_a_model_overwrites_are_unchanged_after_the_pass() -> None:
    given = [torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows)) for rows in (2, 5)]
    before = deepcopy(given)
    module = stored_in(WritesToItsInput, "float32")
    session = de.open(deepcopy(module), inputs=given)
    assert session.drift().output.sqnr_db == math.inf
    session.cast("two", "float16")
    noise = energy = 0.0
    for x in before:
        half = deepcopy(module.two).half()
        with torch.no_grad():
            y = module.one(2 * x + 1)
            expected = module.head(module.two(y))
            noise += float((module.head(half(y.half()).float()) - expected).double().square().sum())
            energy += float(expected.double().square().sum())
    first = figures(session)
    assert session.drift().output.sqnr_db == pytest.approx(10 * math.log10(energy / noise), abs=0.1)
    session.speed()
    session.floor()
    assert figures(session) == first
    assert all(map(torch.equal, given, before))


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_tensor_passed_as_two_arguments_stays_one_tensor(kind: Any) -> None:
    x = torch.ones(2)
    given = {"a": x, "b": x} if kind is dict else kind((x, x))
    taken: list[Any] = []
    Batch((given, x)).run(lambda *args: taken.extend(args))
    of_container = [*taken[0].values()] if kind is dict else [*taken[0]]
    assert type(taken[0]) is kind
    assert of_container[0] is of_container[1] is taken[1] is not x


def test_random_numbers_are_the_same_in_reference_and_candidate() -> None:
    module = stored_in(DrawsNumbers, "float32")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    session = opened(module)
    assert session.drift().output.sqnr_db == math.inf
    assert torch.equal(torch.rand(3), expected)  # and the caller's numbers go on as if there had been no pass


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_buffer_that_a_model_overwrites_is_restored_after_each_pass(stored: str) -> None:
    session = opened(stored_in(WritesItsBuffer, stored))
    before = session.model.module.mean.clone()
    assert session.drift().notices == ()
    session.cast("two", "float16")
    assert figures(session) == figures(session)
    assert torch.equal(session.model.module.mean, before)
