"""The reference's weights are widened while they are used."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import dtype_engine as de
from dtype_engine.core.cancellation import never
from dtype_engine.runtime.modes.reference import ReferenceMode, WidenedWeights
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner

WIDTH = 640
"""A weight with this many rows and columns takes 1.6 MiB in float32."""


class Several(nn.Module):
    """Large weights of every kind: each used after others, one of them twice, and one that is too small to share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH + 8, bias=False)
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)
        self.small = nn.Linear(WIDTH, 8)
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).t())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids)
        hidden = self.first(hidden)
        also = self.second(hidden)[..., :WIDTH]
        hidden = self.first(hidden + also) @ self.transposed
        return self.small(self.conv(hidden.transpose(1, 2)).transpose(1, 2))


@pytest.fixture
def session() -> de.Session:
    torch.manual_seed(0)
    return de.open(Several().to(torch.bfloat16), inputs=(torch.arange(24).reshape(2, 12),))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the address of each large widened weight, in the order of use."""
    places: list[int] = []
    values = WidenedWeights.values

    def noting(self: WidenedWeights, *given: Any) -> list[torch.Tensor]:
        widened = values(self, *given)
        places.extend(value.data_ptr() for value in widened if value.numel() >= WIDTH * WIDTH)
        return widened

    monkeypatch.setattr(WidenedWeights, "values", noting)
    return places


def test_reference_with_weights_widened_in_shared_memory_is_bitwise_equal_to_plain_torch(
    session: de.Session, taken: list[int]
) -> None:
    batch = session.need_inputs().batches[0]
    with ForwardRunner(session.model, session.settings, never) as runner:
        found = [main_output(runner.reference(runner.reference_call(batch)).output)[1].clone() for _ in range(2)]
    assert taken[1] == taken[2], "two layers, in the memory of the larger one"
    # As a model is after loading. Whether a weight needs gradients decides, also under no_grad, which kernel matmul takes, and
    # on some processors the last bits then differ.
    module = session.model.module.requires_grad_(True)
    with torch.no_grad():
        wanted = nn.Module.float(module)(*batch.args)
    assert torch.equal(found[0], wanted)
    assert torch.equal(found[1], wanted)
    assert len(taken) == 8, "first twice, second and conv"


def test_widened_weights_are_freed_before_the_candidate_pass(
    session: de.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[weakref.ref[WidenedWeights]]()
    held: list[bool] = []
    start, candidate = WidenedWeights.__init__, ForwardRunner.candidate

    def noting_made(self: WidenedWeights, *given: Any) -> None:
        start(self, *given)
        made.append(weakref.ref(self))

    def noting(self: ForwardRunner, *given: Any) -> Any:
        held.append(any(each() is not None for each in made))
        return candidate(self, *given)

    monkeypatch.setattr(WidenedWeights, "__init__", noting_made)
    monkeypatch.setattr(ForwardRunner, "candidate", noting)
    ids = [torch.arange(length).reshape(1, -1) for length in (12, 14, 16)]
    several = de.open(session.model.module, inputs=[{"ids": each} for each in ids])
    several.cast("first", "float16")
    several.drift()
    several.drift()
    assert held == [False] * 6
    assert len(made) == 3


def test_widened_weights_do_not_share_memory_if_gradients_are_needed(session: de.Session) -> None:
    """The backward pass needs them."""
    model = session.model
    (ids,) = session.need_inputs().batches[0].args
    with ReferenceMode(model.by_id, model.device, WidenedWeights()):
        hidden = model.module.table(ids).requires_grad_()
        (model.module.second(model.module.first(hidden)).sum()).backward()
    first, second = (layer.weight.detach().float() for layer in (model.module.first, model.module.second))
    ones = torch.ones(*ids.shape, WIDTH + 8)
    torch.testing.assert_close(hidden.grad, ones @ second @ first)
