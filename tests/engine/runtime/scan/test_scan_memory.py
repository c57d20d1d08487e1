"""A scan's autograd graph holds no copies of weights if these take too much memory, and the scores stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.runtime.scan.test_measured_weights import Use, Uses
from tests.engine.runtime.scan.test_scan import Odd
from tests.helpers import architectures
from torch import nn

import dtype_engine as de
from dtype_engine.runtime.modes.reference import copied_bytes
from dtype_engine.runtime.scan.scan import Scan

KINDS = ("float16", "int8")


def scores(session: Any, budget: int) -> dict[tuple[str, str], float]:
    return Scan(session.model, session.inputs, KINDS, draws=2, budget=budget).run().scores()


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "mixtral", "torch_convolutional", "vit", "whisper", "mamba"])
def test_scan_scores_do_not_depend_on_weights_kept_in_the_autograd_graph(name: str) -> None:
    module, inputs = architectures.make(name)
    session = de.open(module.bfloat16(), inputs=inputs)
    assert copied_bytes(session.model) > 1
    assert scores(session, 1) == scores(session, 1 << 30)


def test_scan_scores_with_views_of_weights_do_not_depend_on_graph_memory() -> None:
    torch.manual_seed(0)
    session = de.open(Odd().half(), inputs=[torch.randn(3, 8), torch.randn(5, 8)])
    assert scores(session, 1) == scores(session, 1 << 30)


def transposed_after_a_write(own: Uses, x: torch.Tensor) -> torch.Tensor:
    own.weight.mul_(0.25)
    return x @ own.weight.T


def clamped(own: Uses, x: torch.Tensor) -> torch.Tensor:
    own.weight.data.clamp_(-0.1, 0.1)
    return x @ own.weight.mT


def standardized(own: Uses, x: torch.Tensor) -> torch.Tensor:
    wide = own.weight.to(torch.float32)
    wide.sub_(wide.mean())
    return (x.float() @ wide.T).to(x.dtype)


def written_view(own: Uses, x: torch.Tensor) -> torch.Tensor:
    view = own.weight.t()
    view.mul_(2)
    return x @ view


def written_alias(own: Uses, x: torch.Tensor) -> torch.Tensor:
    alias = own.weight.detach()
    alias.mul_(0.25)
    return x @ alias


def gradient_of_its_own(own: Uses, x: torch.Tensor) -> torch.Tensor:
    return x + torch.func.grad(lambda z: torch.tanh(z @ own.weight).sum())(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "use", [transposed_after_a_write, clamped, standardized, written_view, written_alias, gradient_of_its_own]
)
def test_backward_pass_of_a_scan_uses_weight_values_as_changed_by_the_forward_pass(
    use: Use, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    session = de.open(Uses(use).to(dtype), inputs=[torch.randn(3, 8)])
    small, large = (
        Scan(session.model, session.inputs, ("int8",), draws=300, budget=budget).run().scores()  # type: ignore[arg-type]
        for budget in (1, 1 << 30)
    )
    assert small == large
    for key, exact in session.scan(["int8"], exact=True).scores().items():
        if key[1] == "int8" and key[0].startswith("first"):
            assert small[key] == pytest.approx(exact, rel=0.02)


def test_scan_scores_an_embedding_of_which_one_row_is_looked_up() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 4))
    session = de.open(net.half(), inputs=(torch.tensor(3),))
    found, exact = session.scan(["int8"], draws=300).scores(), session.scan(["int8"], exact=True).scores()
    assert found["0.weight", "int8"] == pytest.approx(exact["0.weight", "int8"], rel=0.05)
