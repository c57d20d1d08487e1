"""Memory layouts and flags of tensors, by which torch chooses its kernels, reach an operation as in plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dtype_engine as de
from dtype_engine.core.cancellation import never
from dtype_engine.runtime.modes.candidate import candidate_value
from dtype_engine.runtime.passes.runner import ForwardRunner

WHOLE = torch.randn(2, 64, 512, generator=torch.Generator().manual_seed(0)).half()
INPUTS = {
    "contiguous": WHOLE,
    "a part": WHOLE[:, :, 100:356],
    "every other": WHOLE[:, :, ::2],
    "repeated": WHOLE[:1, :, :256].expand(2, -1, -1),
    "turned": WHOLE.transpose(1, 2)[:, :64],
}


class Projected(nn.Module):
    """A linear layer over channels, the first or the last dimension of its input."""

    def __init__(self, turned: bool, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 96)
        self.turned = turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.transpose(1, 2) if self.turned else x)


def measured(session: de.Session) -> torch.Tensor:
    """The candidate's output of a copy of the first input, as in a measurement."""
    with ForwardRunner(session.model, session.settings, never) as runner:
        call = runner.candidate_call(session.need_inputs().batches[0])
        return runner.candidate(call).output  # type: ignore[no-any-return]


def made(turned: bool, trained: bool, x: torch.Tensor) -> nn.Module:
    torch.manual_seed(0)
    return Projected(turned, x.shape[1 if turned else 2]).requires_grad_(trained)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("name", INPUTS)
def test_linear_layer_rounds_as_in_plain_torch(name: str, turned: bool, trained: bool) -> None:
    """In float16, by the strides of its input, and by whether its weights require gradients, though none are computed."""
    x = INPUTS[name]
    session = de.open(made(turned, trained, x), inputs={"x": x})
    for dtype in ("float16", "int8"):
        session.cast("layer", dtype)
        plain = made(turned, trained, x)
        for own, tensor in plain.named_parameters():
            tensor.data = candidate_value(session.model.weights[own], torch.float16)
        with torch.no_grad():
            assert torch.equal(measured(session), plain(x)), dtype
    assert not any(each.requires_grad for each in session.model.module.parameters())


class Reads(nn.Module):
    """Uses what a weight says of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.fixed = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4), requires_grad=False)
        self.said: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = x * self.weight + self.fixed
        self.said.append((self.weight.requires_grad, self.fixed.requires_grad, product.requires_grad))
        return product


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_say_of_themselves_what_they_say_in_plain_torch(dtype: str) -> None:
    module, said = Reads(), set[Any]()
    module.register_forward_hook(lambda module, args, output: said.update(module.said))
    session = de.open(module, inputs={"x": torch.ones(4)})
    session.cast("*", dtype)
    session.drift()
    session.scan(dtypes=["bfloat16"])
    by_hand = copy.deepcopy(module)
    by_hand.weight.requires_grad_()
    with torch.no_grad():
        by_hand(torch.ones(4))
    assert by_hand.said[-1] in said
