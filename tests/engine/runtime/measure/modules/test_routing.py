"""Modules inside experts: compared where they were given the same tokens as in the reference, by what plain hooks see."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.helpers import architectures
from torch import nn

import dtype_engine as de
from dtype_engine.results.drift import ModuleDrift, worst_modules
from dtype_engine.runtime.measure.listener import MeasurementListener

ALL = MeasurementListener(all_modules=lambda: True)


def choices(model: nn.Module, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The experts of each token, layer by layer, in plain torch."""
    found: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any) -> None:
        found.append(args[1].clone())

    handles = [
        module.register_forward_pre_hook(keep) for name, module in model.named_modules() if name.endswith(".experts")
    ]
    with torch.no_grad():
        model(**given)
    for handle in handles:
        handle.remove()
    return found


def drift_of(session: de.Session) -> dict[str, ModuleDrift]:
    return {each.name: each for each in session.drift(ALL).modules}


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_with_other_tokens_than_in_the_reference_are_not_compared(name: str) -> None:
    torch.manual_seed(1)
    module, _ = architectures.make(name)
    given = {"input_ids": torch.randint(3, architectures.VOCABULARY, (2, 300))}
    narrow = copy.deepcopy(module)
    for parameter in narrow.parameters():
        parameter.data = parameter.data.bfloat16()
    pairs = list(zip(choices(module, given), choices(narrow, given), strict=True))
    layers = [label.split(".")[2] for label, _ in module.named_modules() if label.endswith(".experts")]
    session = de.open(module, inputs=given)
    session.cast("*", "bfloat16")
    report = session.drift(ALL)
    found = {each.name: each for each in report.modules}
    assert any(not torch.equal(*pair) for pair in pairs)
    for layer, pair in zip(layers, pairs, strict=True):
        inside = found[f"model.layers.{layer}.mlp.experts.act_fn"]
        assert (inside.sqnr_db is None) == (not torch.equal(*pair))
        assert found[f"model.layers.{layer}.mlp.experts"].sqnr_db is not None
        assert found[f"model.layers.{layer}.mlp.gate"].sqnr_db is not None
    worst = {each.name for each in worst_modules(report.modules)}
    assert not worst & {each.name for each in report.modules if each.sqnr_db is None}
    assert any("got other tokens than in the reference" in notice for notice in report.notices)


def test_experts_with_the_same_tokens_as_in_the_reference_are_compared() -> None:
    torch.manual_seed(1)
    module, given = architectures.make("mixtral")
    session = de.open(module, inputs=given)
    session.cast("model.layers.1.mlp.experts", "bfloat16")
    found = drift_of(session)
    for name in ("model.layers.0.mlp.experts.act_fn", "model.layers.1.mlp.experts.act_fn"):
        assert found[name].sqnr_db is not None


class Experts(nn.Module):
    """Top-1 experts in a list, as models with code of their own have them: the router gives scores alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = Config()
        self.first = nn.Linear(16, 16)
        self.gate = nn.Linear(16, 2, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        best = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (best == index).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]).to(out.dtype))
        return out


class Config:
    def to_dict(self) -> dict[str, Any]:
        return {"num_experts": 2, "num_experts_per_tok": 1}


def test_experts_with_equally_many_but_other_tokens_are_not_compared() -> None:
    """One token moves in each direction, so that each expert gets as many rows as before, but of other tokens."""
    model, narrow = Experts(), Experts()
    narrow.first.weight.data = narrow.first.weight.data.bfloat16().float()
    many = torch.randn(400_000, 16)
    with torch.no_grad():
        before, after = ((each.gate(each.first(many)) @ torch.tensor([1.0, -1.0])) for each in (model, narrow))
    away, back = ((before * sign).clamp(min=0) * (-after * sign).clamp(min=0) for sign in (1, -1))
    stay = (before * after).topk(40).indices
    x = many[torch.cat([away.argmax()[None], stay, back.argmax()[None]])]
    with torch.no_grad():
        first, then = (each.gate(each.first(x)).argmax(-1) for each in (model, narrow))
    assert first.sum() == then.sum()
    assert (first != then).nonzero()[:, 0].tolist() == [0, 41]
    session = de.open(model, inputs=(x,))
    session.cast("first", "bfloat16")
    found = drift_of(session)
    assert found["gate"].sqnr_db is not None
    for index in range(2):
        assert found[f"experts.{index}.0"].sqnr_db is None
    assert found["first"].sqnr_db is not None
    session.undo()
    session.cast("experts.0", "bfloat16")
    found = drift_of(session)
    assert found["experts.0.0"].sqnr_db is not None


def test_experts_behind_a_reused_router_output_are_not_compared() -> None:
    """The second measurement reuses a router's output. With so many tokens, some go to other experts on every device."""
    torch.manual_seed(1)
    module, _ = architectures.make("mixtral")
    given = {"input_ids": torch.randint(3, architectures.VOCABULARY, (2, 800))}
    session = de.open(module, inputs=given)
    session.cast("*", "bfloat16")
    first = drift_of(session)
    session.cast("model.layers.1.mlp.experts", "float16")
    second = drift_of(session)
    name = "model.layers.1.mlp.experts.act_fn"
    assert first[name].sqnr_db is None
    assert second[name].sqnr_db is None
