"""The reference's weights, widened as they are used."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dtype_engine as de
from dtype_engine.core.cancellation import never
from dtype_engine.runtime.modes.reference import ReferenceMode
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner, NullObserver

WIDTH = 640
"""A weight of so many rows and columns has 1.6 MiB in float32."""


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


def test_memory_that_weights_share_changes_no_bit(session: de.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = session.need_inputs().batches[0]
    taken: list[int] = []
    widened = ReferenceMode._widened

    def counted(self: ReferenceMode, weights: object) -> list[torch.Tensor]:
        values = widened(self, weights)  # type: ignore[arg-type]
        taken.extend(value.data_ptr() for value in values if value.numel() >= WIDTH * WIDTH)
        return values

    monkeypatch.setattr(ReferenceMode, "_widened", counted)
    with ForwardRunner(session.model, session.settings, never) as runner:
        found = main_output(runner.reference(batch, NullObserver())[0])[1]
    module = session.model.module
    with torch.no_grad():
        wanted = nn.Module.float(module)(*batch.args)
    assert torch.equal(found, wanted)
    assert len(taken) == 4, "first twice, second and conv"
    assert taken[1] == taken[2], "in the memory of the one before, which was larger"


def test_with_gradients_every_weight_keeps_its_own_memory(session: de.Session) -> None:
    """The backward pass needs them."""
    model = session.model
    (ids,) = session.need_inputs().batches[0].args
    with ReferenceMode(model.by_id, model.device, shares_memory=True):
        hidden = model.module.table(ids).requires_grad_()
        (model.module.second(model.module.first(hidden)).sum()).backward()
    first, second = (layer.weight.detach().float() for layer in (model.module.first, model.module.second))
    ones = torch.ones(*ids.shape, WIDTH + 8)
    torch.testing.assert_close(hidden.grad, ones @ second @ first)
