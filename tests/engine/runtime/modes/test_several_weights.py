"""Weights of several dtypes in one call of torch, against plain torch with the tensors cast by hand: equal in every bit, and cast
only where torch raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.candidate_output import candidate_output
from tests.helpers.plain_torch import by_hand
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import dtype_engine as de
from dtype_engine import Recipe, Rule

pytestmark = pytest.mark.cpu_only("which dtypes torch takes differs from device to device")
ROWS = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
Run = Callable[[Any, torch.Tensor], torch.Tensor]


class Runs(nn.Module):
    """Calls `run` with a layer and the input."""

    def __init__(self, layer: nn.Module, run: Run) -> None:
        super().__init__()
        self.layer, self.run = layer, run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.layer, x)


class Owner(nn.Module):
    """Has parameters of the given sizes, by name."""

    def __init__(self, **sizes: tuple[int, ...]) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.rand(size) + 0.1))


class OfItsInput(nn.GRU):
    def forward(self, input: torch.Tensor, hx: Any = None) -> Any:
        return super().forward(input * 0.5, hx)


def of_recurrent(layer: nn.RNNBase, run: Run = lambda layer, x: layer(x)[0]) -> nn.Module:
    return Runs(layer, run)


def packed(layer: nn.RNNBase, x: torch.Tensor) -> torch.Tensor:
    output, _ = layer(pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True))
    return pad_packed_sequence(output, batch_first=True)[0]


def stepped(cell: nn.Module, x: torch.Tensor) -> torch.Tensor:
    state = None
    for step in range(x.shape[1]):
        state = cell(x[:, step], state)
    return state[0] if isinstance(state, tuple) else state  # type: ignore[return-value]


def from_float32(layer: nn.GRU, x: torch.Tensor) -> torch.Tensor:
    return layer(x, torch.zeros(1, 3, 6))[0]  # type: ignore[no-any-return]


def by_torch(owner: Any, x: torch.Tensor) -> torch.Tensor:
    weights = [owner.w_ih, owner.w_hh, owner.b_ih, owner.b_hh]
    return torch.gru(x, x.new_zeros(1, 3, 6), weights, True, 1, 0.0, False, False, True)[0]


def normed() -> nn.Module:
    return of_recurrent(weight_norm(nn.GRU(8, 6, batch_first=True), "weight_ih_l0"))


def made_in_the_pass(owner: Any, x: torch.Tensor) -> torch.Tensor:
    weights = {f"{name}_l0": getattr(owner, name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    return torch.func.functional_call(nn.GRU(8, 6, batch_first=True), weights, (x,))[0]  # type: ignore[no-any-return]


def both_layouts(owner: Any, x: torch.Tensor) -> torch.Tensor:
    turned = x.transpose(0, 1)
    return functional.linear(turned, owner.w, owner.b) + functional.linear(turned.contiguous(), owner.w, owner.b)


def nothing_then_all(owner: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([functional.conv1d(x[:0], owner.w), functional.conv1d(x, owner.w)])


def all_then_nothing(owner: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([functional.conv1d(x, owner.w), functional.conv1d(x[:0], owner.w)])


def bag(layer: Any, x: torch.Tensor) -> torch.Tensor:
    ids = torch.arange(12).view(3, 4)
    return layer.table(ids, per_sample_weights=layer.weights[ids]) * x[:, 0]  # type: ignore[no-any-return]


def with_bag() -> nn.Module:
    owner = Owner(weights=(12,))
    owner.table = nn.EmbeddingBag(12, 8, mode="sum")
    return Runs(owner, bag)


def matrices(run: Run, **sizes: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: Runs(Owner(**sizes), run)


W_B = {"w": (8, 8), "b": (8,)}
MAKE: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: of_recurrent(nn.GRU(8, 6, batch_first=True)),
    "GRU, time first": lambda: of_recurrent(nn.GRU(8, 6)),
    "RNN": lambda: of_recurrent(nn.RNN(8, 6, batch_first=True)),
    "LSTM": lambda: of_recurrent(nn.LSTM(8, 6)),
    "LSTM, projected": lambda: of_recurrent(nn.LSTM(8, 6, proj_size=4, batch_first=True)),
    "LSTM, two layers both ways": lambda: of_recurrent(nn.LSTM(8, 6, 2, bidirectional=True, bias=False)),
    "GRU, called with a keyword": lambda: of_recurrent(
        nn.GRU(8, 6, batch_first=True), lambda layer, x: layer(input=x)[0]
    ),
    "GRU, its forward called": lambda: of_recurrent(
        nn.GRU(8, 6, batch_first=True), lambda layer, x: layer.forward(x)[0]
    ),
    "GRU, the model itself": lambda: nn.GRU(8, 6, batch_first=True),
    "GRU, packed": lambda: of_recurrent(nn.GRU(8, 6, batch_first=True), packed),
    "GRU, float32 state": lambda: of_recurrent(nn.GRU(8, 6, batch_first=True), from_float32),
    "GRU, subclass": lambda: of_recurrent(OfItsInput(8, 6, batch_first=True)),
    "GRU, weight_norm": normed,
    "GRU, made in the pass": matrices(
        made_in_the_pass, weight_ih=(18, 8), weight_hh=(18, 6), bias_ih=(18,), bias_hh=(18,)
    ),
    "torch.gru": matrices(by_torch, w_ih=(18, 8), w_hh=(18, 6), b_ih=(18,), b_hh=(18,)),
    "GRUCell": lambda: Runs(nn.GRUCell(8, 6), stepped),
    "LSTMCell": lambda: Runs(nn.LSTMCell(8, 6), stepped),
    "Bilinear": lambda: Runs(nn.Bilinear(8, 8, 4), lambda layer, x: layer(x, x)),
    "MultiheadAttention": lambda: Runs(
        nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True),
        lambda layer, x: layer(x, x[..., :6], x[..., :4])[0],
    ),
    "linear, both layouts": matrices(both_layouts, **W_B),
    "conv1d": matrices(lambda owner, x: functional.conv1d(x, owner.w, owner.b), w=(4, 5, 3), b=(4,)),
    "layer_norm": matrices(lambda owner, x: functional.layer_norm(x, (8,), owner.w, owner.b), w=(8,), b=(8,)),
    "rms_norm": matrices(lambda owner, x: functional.rms_norm(x @ owner.v, (8,), owner.w), w=(8,), v=(8, 8)),
    "batch_norm": matrices(
        lambda owner, x: functional.batch_norm(x, owner.m, owner.v, owner.w, owner.b), m=(5,), v=(5,), w=(5,), b=(5,)
    ),
    "addmm": matrices(lambda owner, x: torch.addmm(owner.b, x[0], owner.w), **W_B),
    "baddbmm": matrices(lambda owner, x: torch.baddbmm(owner.b, x, owner.w), w=(3, 8, 8), b=(1, 8)),
    "conv1d, nothing, then all": matrices(nothing_then_all, w=(4, 5, 3)),
    "conv1d, all, then nothing": matrices(all_then_nothing, w=(4, 5, 3)),
    "EmbeddingBag": with_bag,
}


def recipes(names: list[str]) -> Iterator[dict[str, str]]:
    """All weights in one dtype, and all but one."""
    for base in ("bfloat16", "float16", "float32"):
        yield dict.fromkeys(names, base)
        for name in names:
            yield dict.fromkeys(names, base) | {name: "bfloat16" if base == "float32" else "float32"}


def raises(make: Callable[[], tuple[nn.Module, Any]], recipe: dict[str, str]) -> bool:
    """Whether plain torch raises, without any mode."""
    module, inputs = make()
    for name, tensor in module.named_parameters():
        tensor.data = tensor.data.to(getattr(torch, recipe[name]))
    try:
        with torch.no_grad():
            module(*inputs)
    except (RuntimeError, ValueError):
        return True
    return False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32 input", "bfloat16 input"])
@pytest.mark.parametrize("name", MAKE)
def test_weights_of_one_call_meet_as_in_plain_torch(name: str, dtype: torch.dtype) -> None:
    def make() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        # `requires_grad` would change how `matmul` multiplies.
        return MAKE[name]().eval().requires_grad_(False), (ROWS.to(dtype),)

    module, inputs = make()
    session = de.open(module, inputs=inputs)
    accepted = 0
    for recipe in recipes([name for name, _ in module.named_parameters()]):
        session.apply(Recipe(tuple(Rule(pattern, each) for pattern, each in recipe.items())))
        expected, added = by_hand(make, recipe)
        found = candidate_output(session)
        assert found.dtype == expected.dtype, recipe
        assert torch.equal(found, expected), recipe
        assert added == raises(make, recipe) == any(row.torch_raises for row in session.flow()), recipe
        accepted += not added
    assert accepted


def test_bias_of_a_recurrent_layer_in_another_dtype_changes_no_other_weight() -> None:
    """torch adds it to what it computed in bfloat16, so the drift is that of a copy which it runs."""
    layers = [nn.GRU(8, 6, batch_first=True) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    session = de.open(Runs(layers[0], lambda layer, x: layer(x)[0]), inputs=(ROWS.bfloat16(),))
    session.cast("*", "bfloat16")
    session.cast("layer.bias_ih_l0", "float32")
    with torch.no_grad():
        reference = layers[1](ROWS.bfloat16().float())[0].double()
        for name, tensor in layers[1].named_parameters():
            tensor.data = tensor.data.bfloat16() if name != "bias_ih_l0" else tensor.data
        candidate = layers[1](ROWS.bfloat16())[0].double()
    error = float((reference - candidate).norm() / reference.norm())
    assert session.drift().output.rel_l2 == pytest.approx(error, rel=1e-6)
    assert not any(row.torch_raises for row in session.flow())


def test_recurrent_layer_of_a_checkpoint_runs_in_mixed_dtypes_as_it_was_measured(tmp_path: Path) -> None:
    module = nn.GRU(8, 6, batch_first=True)
    session = de.open(module, inputs=(ROWS,))
    session.cast("*", "bfloat16")
    session.cast("bias_hh_l0", "float32")
    measured = candidate_output(session)
    session.export(tmp_path / "mixed")
    loaded = de.load_pretrained(tmp_path / "mixed", module=nn.GRU(8, 6, batch_first=True))
    with de.mixed_dtypes(), torch.no_grad():
        assert torch.equal(loaded(ROWS)[0], measured)


def test_recurrent_layer_compares_dtypes_again_after_passes_of_several_threads() -> None:
    module = nn.GRU(8, 6).bfloat16()
    with ThreadPoolExecutor(1) as other, ExitStack() as outer:
        outer.enter_context(de.mixed_dtypes())
        mode = de.mixed_dtypes()
        other.submit(mode.__enter__).result()
        outer.close()
        assert other.submit(module, ROWS).result()[0].dtype == torch.bfloat16
        other.submit(mode.__exit__, None, None, None).result()
    with pytest.raises(ValueError, match=r"does not match weight dtype|input must have the type"):  # torch 2.10
        module(ROWS)
    with de.mixed_dtypes(), pytest.raises(RuntimeError, match=r"input\.size"):
        module(ROWS[..., :7])
