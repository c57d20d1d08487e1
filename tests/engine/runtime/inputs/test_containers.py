"""Tensors in any container: as an argument, inside the model, and as its output."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.measured_on import placed
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import dtype_engine as de
from dtype_engine.runtime.inputs import Batch, from_values
from dtype_engine.runtime.inputs.tensor_files import read_tensors
from dtype_engine.runtime.passes.outputs import main_output

X = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([5, 3])
Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    scale: float = 2.0


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any
    made: Any = dataclasses.field(init=False, default=None)


class Recurrent(nn.Module):
    """A recurrent layer over sequences of different lengths."""

    def __init__(self, kind: type[nn.RNNBase], packs: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.r = kind(6, 10, batch_first=True)
        self.packs = packs

    def forward(self, x: Any) -> torch.Tensor:
        packed = pack_padded_sequence(x, LENGTHS, batch_first=True) if self.packs else x
        return pad_packed_sequence(self.r(packed)[0], batch_first=True)[0]


@pytest.mark.parametrize("packs", [True, False], ids=["inside", "given"])
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
def test_recurrent_layer_runs_on_a_packed_sequence(kind: type[nn.RNNBase], packs: bool) -> None:
    given = X if packs else pack_padded_sequence(X, LENGTHS, batch_first=True)
    given = placed(given)
    plain = placed(Recurrent(kind, packs))
    plain.requires_grad_(False)
    reference = plain(given)
    plain.to(torch.bfloat16)
    drift = (plain(given.to(torch.bfloat16)).cpu().double() - reference.cpu().double()).abs()
    session = de.open(Recurrent(kind, packs), inputs=(given,))
    session.cast("r", "bfloat16")
    found = session.drift().output
    assert (found.mean_abs, found.max_abs) == (pytest.approx(float(drift.mean())), pytest.approx(float(drift.max())))
    session.cast("r", "int8")
    assert 0 < session.drift().output.mean_abs < 0.01
    session.cast("r", "float32")
    session.cast("r.weight_ih_l0", "bfloat16")
    assert 0 < session.drift().output.mean_abs < 0.01


WRAPPED: dict[str, Callable[[torch.Tensor], Any]] = {
    "namedtuple": lambda x: Pair(x, None),
    "frozen": Frozen,
    "slots": Slotted,
    "mapping": lambda x: UserDict(x=x),
    "nested": lambda x: {"a": [(Frozen({"b": x}),), "c"]},
    "packed": lambda x: pack_padded_sequence(x, LENGTHS, batch_first=True),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_batch_moves_and_copies_nested_tensors(name: str) -> None:
    wrap = WRAPPED[name]
    batch = from_values((wrap(X), {"again": X}), "example_inputs()").batches[0]
    moved = batch.on(torch.device("cpu"), torch.float64)
    assert type(moved.args[0]) is type(batch.args[0])
    floats = [tensor for _, tensor in moved.named_tensors() if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in floats} == {torch.float64}
    assert torch.equal(floats[0], next(tensor for _, tensor in Batch((wrap(X.double()),)).named_tensors()))
    assert batch.elements == sum(tensor.numel() for _, tensor in batch.named_tensors()) > X.numel()

    def writes(value: Any, rest: Any) -> None:
        for _, tensor in Batch((value,)).named_tensors():
            if tensor.is_floating_point():
                tensor.zero_()

    batch.run(writes)
    assert float(next(tensor for _, tensor in batch.named_tensors()).abs().sum()) > 0


def test_argument_without_tensors_keeps_its_type_and_value() -> None:
    size, settings = torch.Size([1, 2]), {"a": [1]}
    batch = Batch((size, settings, Frozen(1))).on(torch.device("cpu"), torch.float64)
    assert batch.args == (size, settings, Frozen(1))
    assert type(batch.args[0]) is torch.Size


def test_packed_sequence_or_dataclass_as_input_is_one_argument() -> None:
    packed = pack_padded_sequence(X, LENGTHS, batch_first=True)
    for value in (packed, Frozen(X)):
        (batch,) = from_values(value, "example_inputs()").batches
        assert len(batch.args) == 1
        assert batch.args[0] is value
    (batch,) = from_values(UserDict(x=X), "example_inputs()").batches
    assert batch.kwargs["x"] is X


def test_tensors_in_nested_containers_are_read_from_files(tmp_path: Any) -> None:
    torch.save(([X, {"y": X}],), tmp_path / "calls.pt")
    (given,) = read_tensors(tmp_path / "calls.pt")
    assert torch.equal(given[1]["y"], X)
    torch.save((["x"],), tmp_path / "none.pt")
    with pytest.raises(de.UserError, match="holds a tuple without tensors"):
        read_tensors(tmp_path / "none.pt")


@dataclasses.dataclass
class Output:
    loss: Any
    hidden: Any
    logits: Any = None


@pytest.mark.parametrize(
    ("output", "name"),
    [
        (Output(None, X), "hidden"),
        (Output(X + 1, X + 2, X), "logits"),
        (Output(None, Output(None, [X])), "hidden"),
        (UserDict(last_hidden_state=X, other=X + 1), "last_hidden_state"),
        (Pair(None, (X,)), "output"),
        ([Output(None, X)], "output"),
    ],
)
def test_main_output_is_found_in_a_container(output: Any, name: str) -> None:
    found = main_output(output)
    assert found[0] == name
    assert found[1] is X


class Returns(nn.Module):
    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.wrap = nn.Linear(6, 4), wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.inner(x))


@pytest.mark.parametrize("wrap", [Frozen, WRAPPED["nested"], WRAPPED["packed"], lambda x: Output(None, x)])
def test_model_that_returns_a_container_is_measured(wrap: Callable[[torch.Tensor], Any]) -> None:
    session = de.open(Returns(wrap), inputs=(X,))
    session.cast("inner", "bfloat16")
    values = [
        placed(Returns(wrap)).to(dtype).inner(X.to(dtype)).detach().cpu().double()
        for dtype in (torch.bfloat16, torch.float32)
    ]
    packed = [wrap(each) for each in values]
    delta = values[0] - values[1] if not isinstance(packed[0], PackedSequence) else packed[0].data - packed[1].data
    assert session.drift().output.max_abs == pytest.approx(float(delta.abs().max()))
