from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.helpers.measured_on import placed
from torch import nn

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.quantize import values_in


class Mixed(nn.Module):
    """Every kind of tensor: a tied weight, buffers of three kinds, a vector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(ids) + self.table))


def session(module: nn.Module | None = None) -> de.session.Session:  # type: ignore[name-defined]
    return de.open(module or Mixed(), inputs=(torch.tensor([1, 2, 3]),))


def test_cast_keeps_tensor_objects_and_ties() -> None:
    module = Mixed()
    before = {name: id(tensor) for name, tensor in module.named_parameters()}
    opened = session(module)
    opened.cast("*", "bfloat16")
    assert {name: id(tensor) for name, tensor in module.named_parameters()} == before
    assert module.head.weight is module.embed.weight
    assert module.head.weight.dtype == torch.bfloat16


def test_cast_of_everything_leaves_integer_boolean_and_nonpersistent_buffers() -> None:
    module = Mixed()
    opened = session(module)
    opened.cast("*", "float16")
    assert module.mask.dtype == torch.bool
    assert module.norm.num_batches_tracked.dtype == torch.int64
    assert module.table.dtype == torch.float32
    assert module.norm.running_mean.dtype == torch.float16
    opened.cast("table", "float16")
    assert module.table.dtype == torch.float16


def test_undo_restores_the_same_storage() -> None:
    module = Mixed()
    pointers = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    opened = session(module)
    opened.cast("*", "bfloat16")
    opened.cast("norm", "float64")
    assert opened.undo()
    assert opened.undo()
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == pointers


def test_repeated_casts_start_from_the_stored_values() -> None:
    module = Mixed()
    stored = module.embed.weight.detach().clone()
    opened = session(module)
    for dtype in ("bfloat16", "fp8", "float16", "float32"):
        opened.cast("embed", dtype)
    assert torch.equal(module.embed.weight, stored)
    opened.cast("embed", "float16")
    assert torch.equal(module.embed.weight, stored.half())


def test_casts_never_overwrite_the_stored_values() -> None:
    opened = session()
    copies = {name: weight.stored.read().clone() for name, weight in opened.model.weights.items()}
    for dtype in ("bfloat16", "int8", "float64"):
        opened.cast("*", dtype)
        opened.drift()
    for name, weight in opened.model.weights.items():
        assert torch.equal(weight.stored.read(), copies[name])


def test_resident_bytes_sum_over_distinct_tensors() -> None:
    module = Mixed()
    opened = session(module)
    opened.cast("*", "bfloat16")
    distinct = {id(tensor): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())}
    assert opened.memory().resident_bytes == sum(distinct.values())


def test_resident_bytes_equal_the_footprint_of_transformers(make_llama: Callable[..., Path]) -> None:
    opened = de.open(str(make_llama()))
    for dtype in ("float32", "bfloat16"):
        opened.cast("*", dtype)
        assert opened.memory().resident_bytes == opened.model.module.get_memory_footprint()


def test_next_cast_replaces_a_cancelled_one_in_all_tensors() -> None:
    opened = session()
    calls = iter([False, False, True])
    with pytest.raises(Cancelled):
        opened.apply(Recipe((Rule("*", "bfloat16"),)), cancelled=lambda: next(calls))
    assert len({weight.dtype for weight in opened.model.weights.values() if weight.info.castable}) == 2
    opened.apply(Recipe((Rule("*", "float16"),)))
    assert {w.dtype for w in opened.model.weights.values() if w.info.castable and w.info.persistent} == {"float16"}


def test_values_that_overflow_in_a_cast_are_counted() -> None:
    module = Mixed()
    with torch.no_grad():
        module.norm.weight[0] = 1e6
    opened = session(module)
    opened.cast("*", "float16")
    (lost,) = opened.lost_values()
    assert (lost.tensor, lost.overflowed) == ("norm.weight", 1)
    opened.undo()
    assert opened.lost_values() == ()


def test_float32_islands_are_the_modules_that_the_model_class_declares() -> None:
    module = nn.Sequential()
    module.add_module("wo", nn.Linear(2, 2))
    module.add_module("wo2", nn.Linear(2, 2))
    module._keep_in_fp32_modules = ["wo"]
    tree = de.open(module, inputs=(torch.zeros(1, 2),)).tree
    assert tree.modules["wo"].keep_in_fp32 is not None
    assert tree.modules["wo2"].keep_in_fp32 is None


@pytest.mark.parametrize("below", [False, True])
def test_torchscript_modules_are_refused(below: bool) -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    module = nn.Sequential(nn.Linear(4, 4), scripted) if below else scripted
    with pytest.raises(
        UserError, match=r"Sequential: 1 is compiled by TorchScript" if below else "is compiled by TorchScript"
    ):
        de.open(module, inputs=(torch.zeros(2, 4),))


class ConvertsItself(nn.Module):
    """Has its router in float32, as the Switch Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.head = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.router = self.router.to(torch.float32)
        return self.head(self.router(x))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "nvfp4", "mxfp8", "bfloat16"])
def test_submodule_that_the_model_converts_to_float32_has_the_cast_values(dtype: str) -> None:
    given = torch.randn(3, 32)
    expected, plain = placed((ConvertsItself(), ConvertsItself()))
    for tensor in expected.router.parameters():
        tensor.data = values_in(tensor.data, dtype, torch.float32).float()
    with torch.no_grad():
        reference, by_hand = (model(given).cpu().double() for model in (plain, expected))
    opened = de.open(ConvertsItself(), inputs=(given,))
    opened.cast("router", dtype)
    before = opened.model.weights["router.weight"].tensor.data.clone()
    for _ in range(2):
        sqnr = 10 * math.log10(float(reference.square().sum() / (by_hand - reference).square().sum()))
        assert opened.drift().output.sqnr_db == pytest.approx(sqnr, rel=1e-6)
        after = opened.model.weights["router.weight"].tensor.data
        assert after.dtype == before.dtype
        assert torch.equal(after.view(torch.uint8), before.view(torch.uint8))


class Graph(nn.Module):
    """A layer of a graph network: its sparse buffer averages neighbors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("neighbors", (torch.eye(6) + torch.eye(6).roll(1, 0)).to_sparse())
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.neighbors, self.up(x).float())


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_sparse_tensor_is_never_cast(dtype: str) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    session = de.open(Graph(), inputs=(x,))
    session.cast("*", dtype)
    info = session.tree.tensors["neighbors"]
    assert (info.nbytes, info.why_not_cast) == (12 * 4 + 2 * 12 * 8, "is sparse, and is never cast")
    with torch.no_grad():
        r, up = Graph()(x), Graph().up
        scale = up.weight.abs().amax(1, keepdim=True) / 127, up.bias.abs().max() / 127
        cast = [
            each.bfloat16().float() if dtype == "bfloat16" else (each / by).round() * by
            for each, by in zip((up.weight, up.bias), scale, strict=True)
        ]
        x = x.bfloat16().float() if dtype == "bfloat16" else x
        up_x = nn.functional.linear(x, *cast)
        c = Graph().neighbors @ (up_x.bfloat16().float() if dtype == "bfloat16" else up_x)
    assert session.drift().output.mean_abs == pytest.approx(float((c - r).abs().mean()), rel=1e-3)
    with pytest.raises(de.UserError, match="is sparse, and is never cast"):
        session.cast("neighbors", "bfloat16")


class Moving(nn.Module):
    """Gets new tensor objects when it is moved, the first of which has the `id` of an old one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))

    def to(self, *to: object, **rest: object) -> Moving:
        reused, values = self.second, (self.first.data, self.second.data)
        reused.data = values[0]
        self.first, self.second = reused, nn.Parameter(values[1])
        return self


def test_stored_values_are_read_after_moving_a_module_replaces_its_tensors() -> None:
    live = LiveModel.wrap(Moving(), "a model", torch.device("meta"))
    assert [weight.stored.read().tolist() for weight in live.weights.values()] == [[0, 0, 0], [1, 1, 1]]
