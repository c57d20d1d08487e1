"""Causes against the exhaustive truth, and what a planted bad layer is called."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import architectures
from torch import nn

import dtype_engine as de
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.results.attribution import PartialAttribution
from dtype_engine.runtime.measure import attribution as causes


def kl_alone(session: Any, module: str, dtype: str) -> float:
    """The measured KL of one module cast by itself."""
    session.apply(de.Recipe((de.Rule(module, dtype),)))
    return float(session.drift().output.kl_mean)


def text(tmp_path: Path) -> de.Options:
    """Return options with one text that is shorter than what causes measure, so that both use the same positions."""
    file = tmp_path / "text.txt"
    file.write_text("def add(first, second):\n    return first + second\n" * 4)
    return de.Options(texts=(file,))


def test_cause_of_each_module_of_the_demo_equals_the_drift_of_casting_only_this_module(tmp_path: Path) -> None:
    session = de.open(options=text(tmp_path))
    session.cast("*", "bfloat16")
    found = {cause.name: cause for cause in session.causes().causes}
    # The tied table is one tensor with two uses, which no rule tells apart.
    modules = [name for name in found if name not in ("model.embed_tokens", "lm_head")]
    assert len(modules) == 6 * 9 + 1
    exact = de.open(options=text(tmp_path))
    for name in modules:
        if re.search(r"layers\.[1-4]\.", name):
            continue  # they are as those of the first layer and of the last
        assert found[name].drift == pytest.approx(kl_alone(exact, name, "bfloat16"), rel=1e-9), name


def test_share_of_each_cause_is_its_drift_divided_by_the_measured_drift(tmp_path: Path) -> None:
    session = de.open(options=text(tmp_path))
    session.cast("*", "bfloat16")
    session.cast("*.mlp", "int8")
    report = session.causes()
    assert report.whole == pytest.approx(session.drift().output.kl_mean, rel=1e-9)
    for cause in report.causes:
        assert cause.share == cause.drift / report.whole
    assert report.together == pytest.approx(sum(cause.drift for cause in report.causes))
    assert [cause.drift for cause in report.causes] == sorted((c.drift for c in report.causes), reverse=True)


def test_local_error_of_a_module_is_measured_on_its_inputs_in_the_reference() -> None:
    module, inputs = architectures.make("llama")
    heard: dict[str, Any] = {}
    name = "model.layers.1.mlp.down_proj"
    linear = module.get_submodule(name)
    handle = linear.register_forward_hook(lambda m, args, output: heard.update(given=args[0], gave=output))
    with torch.no_grad():
        module(**inputs)
    handle.remove()
    weight = linear.weight.detach().clone()
    session = de.open(module, inputs=inputs)
    session.cast("*", "bfloat16")
    found = next(cause for cause in session.causes().causes if cause.name == name)
    with torch.no_grad():
        cast = nn.functional.linear(heard["given"].bfloat16(), weight.bfloat16()).double()
    delta = cast - heard["gave"].double()
    expected = 20 * math.log10(heard["gave"].double().norm() / delta.norm())
    assert found.local_sqnr_db == pytest.approx(expected, rel=1e-5)


def test_layer_with_a_planted_error_is_named_as_the_cause_of_drift(make_llama: Callable[..., Path]) -> None:
    session = de.open(str(make_llama(num_hidden_layers=4)))
    session.cast("*", "bfloat16")
    bad = "model.layers.2.mlp.down_proj"
    session.model.weights[f"{bad}.weight"].tensor.data.mul_(1.5)
    report = session.causes()
    assert report.causes[0].name == bad
    assert report.causes[0].share is not None
    assert 0.9 < report.causes[0].share < 1.1
    assert (report.causes[1].share or 0) < 0.05


def test_causes_of_a_bfloat16_checkpoint_are_found_without_a_float32_copy(
    monkeypatch: pytest.MonkeyPatch, make_llama: Callable[..., Path]
) -> None:
    monkeypatch.setattr(causes, "ENOUGH_POSITIONS", 10**6)  # all of the inputs, as the measurement
    session = de.open(str(make_llama(dtype="bfloat16")))
    report = session.causes()
    assert report.whole == pytest.approx(session.drift().output.kl_mean, rel=1e-6)
    assert len(report.causes) == 2 * 9 + 3
    assert all(weight.dtype == "bfloat16" for weight in session.model.weights.values() if weight.info.persistent)


def test_search_for_causes_finds_none_if_nothing_drifts(make_llama: Callable[..., Path]) -> None:
    report = de.open(str(make_llama())).causes()
    assert (report.whole, report.causes) == (0.0, ())


@pytest.mark.parametrize("name", ["torch_lstm", "torch_attention", "mixtral", "resnet", "t5", "whisper", "mamba"])
def test_causes_of_drift_are_found_in_every_test_architecture(name: str) -> None:
    module, inputs = architectures.make(name)
    session = de.open(module, inputs=inputs)
    session.cast("*", "bfloat16")
    report = session.causes()
    assert report.whole > 0
    assert report.causes
    assert all(math.isfinite(cause.drift) and cause.drift >= 0 for cause in report.causes)


def test_worst_module_is_found_by_splitting_subtrees_in_few_passes(
    monkeypatch: pytest.MonkeyPatch, make_llama: Callable[..., Path]
) -> None:
    session = de.open(str(make_llama(num_hidden_layers=4)))
    session.cast("*", "bfloat16")
    session.model.weights["model.layers.2.mlp.up_proj.weight"].tensor.data.mul_(1.5)
    alone = {cause.name: cause.drift for cause in session.causes().causes}
    monkeypatch.setattr(causes, "MOST_PASSES", 20)
    report = session.causes()
    assert report.passes <= (20 + 2) * 2  # two sequences
    assert report.causes[0].name == "model.layers.2.mlp.up_proj"
    assert report.causes[0].drift == pytest.approx(alone["model.layers.2.mlp.up_proj"], rel=1e-9)
    assert sum(cause.modules for cause in report.causes) == len(alone)


@pytest.mark.parametrize("most", [160, 20])
def test_intermediate_causes_are_sorted_and_count_no_module_twice(
    most: int, monkeypatch: pytest.MonkeyPatch, make_llama: Callable[..., Path]
) -> None:
    monkeypatch.setattr(causes, "MOST_PASSES", most)
    session = de.open(str(make_llama(num_hidden_layers=4)))
    session.cast("*", "bfloat16")
    told: list[PartialAttribution] = []
    final = session.causes(on_causes=told.append)
    assert [found.done for found in told] == list(range(1, len(told) + 1))
    assert told[-1].report == dataclasses.replace(final, seconds=told[-1].report.seconds)
    each_module = most > 39
    for found in told:
        so_far = found.report
        assert (so_far.unit, so_far.whole, found.total) == (final.unit, final.whole, 39 if each_module else most)
        drifts = [cause.drift for cause in so_far.causes]
        assert drifts == sorted(drifts, reverse=True)
        assert so_far.together == pytest.approx(sum(drifts))
        if each_module:
            assert len(so_far.causes) == found.done
            assert set(so_far.causes) <= set(final.causes)
        else:  # no module counts twice, neither by itself nor in a subtree
            assert sum(cause.modules for cause in so_far.causes) <= 39


def test_search_for_causes_can_be_cancelled_and_is_refused_with_autocast(make_llama: Callable[..., Path]) -> None:
    session = de.open(str(make_llama()))
    session.cast("*", "bfloat16")
    told: list[tuple[int, int]] = []
    with pytest.raises(Cancelled):
        session.causes(lambda done, total: told.append((done, total)), lambda: len(told) >= 3)
    assert told == [(0, causes.MOST_PASSES), (1, 21), (2, 21)]
    session.settings = de.RunSettings(autocast="bfloat16")
    with pytest.raises(UserError, match="autocast"):
        session.causes()


def kl_by_hand(module: nn.Module, narrow: nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    with torch.no_grad():
        p, q = (each(**inputs).logits.double().log_softmax(-1) for each in (module, narrow))
    return float((p.exp() * (p - q)).sum(-1).mean())


def with_router_bias() -> tuple[Any, dict[str, torch.Tensor]]:
    """A DeepSeek-V3 whose bias has as many values as experts in float32, and few in bfloat16, so that ties decide."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(8)
    config = DeepseekV3Config(
        hidden_size=32, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, n_routed_experts=60, num_experts_per_tok=4, n_group=1, topk_group=1, first_k_dense_replace=1,
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, vocab_size=64,
        n_shared_experts=1,
    )  # fmt: skip
    module = DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "experts" in name and parameter.ndim == 3:
                parameter.normal_(0, 0.2)
        gate = module.model.layers[1].mlp.gate
        gate.e_score_correction_bias.copy_(torch.linspace(6.8, 7.1, 60)[torch.randperm(60)])
    return module, {"input_ids": torch.randint(0, 64, (2, 24))}


def test_router_bias_is_the_only_cause_and_casting_it_to_float32_removes_the_drift() -> None:
    module, inputs = with_router_bias()
    narrow, _ = with_router_bias()
    bias = narrow.model.layers[1].mlp.gate.e_score_correction_bias
    bias.data = bias.data.bfloat16()
    expected = kl_by_hand(module, narrow, inputs)
    session = de.open(module, inputs=inputs)
    session.cast("*.e_score_correction_bias", "bfloat16")
    report = session.drift()
    assert report.output.kl_mean == pytest.approx(expected, rel=1e-9)
    causes = session.causes()
    assert [(cause.name, cause.share) for cause in causes.causes] == [("model.layers.1.mlp.gate", pytest.approx(1.0))]
    session.cast("*.e_score_correction_bias", "float32")
    assert session.drift().output.kl_mean == 0


def test_cause_of_an_fp8_router_equals_the_drift_of_casting_only_this_router() -> None:
    module, inputs = with_router_bias()
    narrow, _ = with_router_bias()
    gate = narrow.model.layers[1].mlp.gate
    for tensor in (gate.weight, gate.e_score_correction_bias):
        rows = tensor.data.reshape(len(tensor), -1) if tensor.ndim > 1 else tensor.data[None]
        scale = rows.abs().amax(1, keepdim=True) / 448
        tensor.data = ((rows / scale).to(torch.float8_e4m3fn).float() * scale).reshape(tensor.shape)
    expected = kl_by_hand(module, narrow, inputs)
    session = de.open(module, inputs=inputs)
    session.cast("*", "float8_e4m3fn")
    found = {cause.name: cause.drift for cause in session.causes().causes}
    assert found["model.layers.1.mlp.gate"] == pytest.approx(expected, rel=1e-6)
    assert max(found, key=lambda name: found[name]) == "model.layers.1.mlp.gate"


def test_rotary_frequencies_are_a_cause_only_if_a_rule_names_them() -> None:
    module, _ = architectures.make("llama")
    with torch.no_grad():
        for layer in module.model.layers:  # so that the positions matter
            layer.self_attn.q_proj.weight.mul_(20)
            layer.self_attn.k_proj.weight.mul_(20)
    inputs = {"input_ids": architectures.tokens(200)}
    narrow, weights = (architectures.make("llama")[0] for _ in range(2))
    for each in (narrow, weights):
        each.load_state_dict(module.state_dict())
    narrow.model.rotary_emb.inv_freq.data = narrow.model.rotary_emb.inv_freq.data.bfloat16()
    for parameter in weights.parameters():
        parameter.data = parameter.data.bfloat16()
    of_frequencies, of_weights = (kl_by_hand(module, each, inputs) for each in (narrow, weights))
    session = de.open(module, inputs=inputs)
    session.cast("*.inv_freq", "bfloat16")
    assert session.drift().output.kl_mean == pytest.approx(of_frequencies, rel=1e-6)
    assert [(cause.name, cause.share) for cause in session.causes().causes] == [
        ("model.rotary_emb", pytest.approx(1.0))
    ]
    session.undo()
    session.cast("*", "bfloat16")
    assert session.drift().output.kl_mean == pytest.approx(of_weights, rel=1e-6)


class Uses(nn.Module):
    """Uses its weight through one function alone, as `A_log` of a state space model is."""

    def __init__(self, use: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Module(), nn.Linear(8, 5)
        self.inner.weight = nn.Parameter(torch.randn(8))
        self.inner.forward = lambda x: x * use(self.inner.weight)  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float": lambda weight: weight.float(),
    "type": lambda weight: weight.type(torch.float32),
    "to": lambda weight: weight.to(torch.float32),
    "double": lambda weight: weight.double().float(),
    "index": lambda weight: weight[torch.arange(8)].float(),
    "view": lambda weight: weight[None].t()[:, 0].float(),
}


@pytest.mark.parametrize("use", USES)
def test_drift_caused_by_a_weight_is_found_for_every_way_to_use_it(use: str) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    session = de.open(Uses(USES[use]), inputs=(x,))
    session.cast("inner", "bfloat16")
    module = Uses(USES[use])
    with torch.no_grad():
        reference = module(x).double()
        weight = module.inner.weight.data.bfloat16().float()
        difference = module.head(x * weight).double() - reference
    (cause,) = session.causes().causes
    assert cause.name == "inner"
    assert cause.drift == pytest.approx(float(difference.square().sum() / reference.square().sum()), rel=1e-6)


def test_search_for_causes_resumes_after_a_cancellation(
    make_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causes, "MOST_PASSES", 20)  # subtrees, of which some are split
    folder, inputs = str(make_llama(num_hidden_layers=4)), {"input_ids": architectures.tokens(24)}
    session, fresh = (de.open(folder, inputs=inputs) for _ in range(2))
    for each in (session, fresh):
        each.cast("*", "bfloat16")
    measured: list[str] = []
    alone = causes.Attribution._part

    def counted(self: causes.Attribution, runner: Any, part: causes.Part) -> causes.PartDrift:
        measured.append(part.name)
        return alone(self, runner, part)

    monkeypatch.setattr(causes.Attribution, "_part", counted)
    with pytest.raises(Cancelled):
        session.causes(cancelled=lambda: len(measured) >= 12)
    before, found = set(measured[:-1]), list[PartialAttribution]()
    again = session.causes(on_causes=found.append)
    assert not before & set(measured[12:]), "nothing is measured twice"
    assert found[0].done > 1
    assert (found[0].total, found[-1].done) == (20, len(set(measured)))
    expected = fresh.causes()
    assert dataclasses.replace(again, seconds=0.0) == dataclasses.replace(expected, seconds=0.0)
    measured.clear()
    with pytest.raises(Cancelled):
        session.causes(cancelled=lambda: len(measured) >= 5)
    session.cast("*.mlp", "int8")
    measured.clear()
    found.clear()
    session.causes(on_causes=found.append)
    assert found[0].done == 1, "another recipe has other causes"
