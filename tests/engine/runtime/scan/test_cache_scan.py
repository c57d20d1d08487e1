"""Scans and searches of KV caches: which keys and values need more bits, and recipes of weights and caches under one budget."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers
from tests.helpers import architectures
from tests.helpers.rank_correlation import compared

import dtype_engine as de
from dtype_engine.recipe import tensor_bytes
from dtype_engine.recipe.serving_memory import cache_tensor_bytes
from dtype_engine.search.pareto import Constraints, make_front, written_dtype

FORMATS = ("kv:bf16", "kv:fp8", "kv:int8@token", "kv:int4@token")
CONTEXT = 1000
OUTLIERS = ("model.layers.1.self_attn.kv_cache.k", "model.layers.4.self_attn.kv_cache.k")


@pytest.fixture(scope="module")
def session() -> de.Session:
    """A tiny Qwen2 in which two layers add a large bias to a few channels of their keys."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.06,
    )  # fmt: skip
    module = transformers.Qwen2ForCausalLM(config).eval()
    for name in OUTLIERS:
        attention: Any = module.get_submodule(name.rpartition(".kv_cache")[0])
        with torch.no_grad():
            attention.k_proj.bias[::11] = 200.0
    ids = architectures.tokens(64, vocabulary=64)
    return de.open(module, inputs=[{"input_ids": ids}, {"input_ids": ids.flip(1)}])


@pytest.fixture(scope="module")
def scanned(session: de.Session) -> de.ScanReport:
    return session.scan(("float32", *FORMATS))


def test_scan_of_kv_caches_ranks_keys_with_outliers_first(scanned: de.ScanReport) -> None:
    for form in ("kv:float8_e4m3fn", "kv:int8@token"):
        scores = {weight.name: weight.score for weight in scanned.weights if weight.dtype == form}
        assert len(scores) == 12
        assert set(sorted(scores, key=lambda name: -scores[name])[:2]) == set(OUTLIERS), form


def test_estimated_scores_of_kv_caches_rank_like_exact_scores(session: de.Session, scanned: de.ScanReport) -> None:
    exact = session.scan(FORMATS, exact=True)
    correlation, ratio, count = compared(scanned, exact)
    assert count == 48
    assert correlation > 0.98
    assert 0.8 < ratio < 1.25
    # In int4, the values of the first layer matter more than one of the two outliers. Estimates find this order, too.
    for report in (scanned, exact):
        of_int4 = {weight.name: weight.score for weight in report.weights if weight.dtype == "kv:int4@token"}
        ranked = sorted(of_int4, key=lambda name: -of_int4[name])
        assert ranked[:3] == [OUTLIERS[0], "model.layers.0.self_attn.kv_cache.v", OUTLIERS[1]]
    assert not session.model.cache_formats
    session.scanned = scanned


def test_found_kv_cache_formats_drift_less_than_fp8_of_the_same_size(
    session: de.Session, scanned: de.ScanReport
) -> None:
    caches = session.tree.kv_cache.tensors
    uniform = sum(cache_tensor_bytes(tensor, "float8_e4m3fn", CONTEXT, 1) for tensor in caches)
    session.use_recipe(de.Recipe.of([de.Rule.parse("*.kv_cache=fp8")]))
    drift = session.drift().output.kl_mean
    constraints = Constraints(keep=("*",), context=CONTEXT)
    report = session.search(session.tree.stored_bytes + uniform, constraints=constraints, measure=True)
    assert report.cache_bytes <= uniform
    assert report.planned_bytes == session.tree.stored_bytes + report.cache_bytes
    assert {session.plan.caches[name] for name in OUTLIERS} <= {"bfloat16", "int8@token"}
    assert "int4@token" in session.plan.caches.values()
    assert drift is not None
    assert report.measured is not None
    assert report.measured < drift / 5
    assert session.predict().value == pytest.approx(report.predicted)


def test_search_of_weights_and_kv_caches_under_one_budget_is_optimal() -> None:
    """Against all combinations of the dtypes of a tiny model's linear layers and the formats of its caches."""
    module, inputs = architectures.make("llama")
    session = de.open(module, inputs=inputs)
    scores = session.scan(("float32", "bfloat16", "kv:fp8", "kv:int8@token"), draws=4).scores()
    kept = "re:(?!.*(q_proj|down_proj)).*weight"
    constraints = Constraints(keep=(kept,), context=64, batch=2)
    front = make_front(session.tree, scores, constraints)
    weights = [name for name in session.tree.tensors if name.endswith(("q_proj.weight", "down_proj.weight"))]
    rows = [
        [(tensor_bytes(session.tree.tensors[name], dtype), scores[name, dtype]) for dtype in ("float32", "bfloat16")]
        for name in weights
    ]
    for tensor in session.tree.kv_cache.tensors:
        forms = [(form, scores[tensor.name, f"kv:{form}"]) for form in ("float8_e4m3fn", "int8@token")]
        forms.append((written_dtype(session.tree), 0.0))
        rows.append([(cache_tensor_bytes(tensor, form, 64, 2), score) for form, score in forms])
    fixed = session.tree.stored_bytes - sum(session.tree.tensors[name].nbytes for name in weights)
    whole = [(fixed + sum(size for size, _ in row), sum(score for _, score in row)) for row in itertools.product(*rows)]
    smallest, largest = min(whole)[0], max(whole)[0]
    for budget in range(smallest, largest, (largest - smallest) // 23):
        found = front.best_within(budget)
        assert found is not None
        assert found.bytes <= budget
        assert found.score == pytest.approx(min(score for size, score in whole if size <= budget), rel=1e-9, abs=1e-15)


def _jamba() -> Any:
    torch.manual_seed(0)
    config = transformers.JambaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        attn_layer_period=2, attn_layer_offset=1, num_experts=2, use_mamba_kernels=False, mamba_d_state=4,
        initializer_range=0.3,
    )  # fmt: skip
    return transformers.JambaForCausalLM(config).eval()


def test_scan_scores_keys_and_values_of_a_hybrid_model_and_says_that_it_leaves_out_its_states() -> None:
    session = de.open(_jamba(), inputs=[{"input_ids": architectures.tokens(24, vocabulary=64)}])
    report = session.scan(("bfloat16", "kv:fp8"), draws=2)
    scored = {weight.name.rpartition(".")[2] for weight in report.weights if weight.dtype.startswith("kv:")}
    assert scored == {"k", "v"}
    assert any(notice.startswith("4 recurrent states not scored") for notice in report.notices)
    assert not any("not scored" in notice for notice in session.scan(("bfloat16",), draws=2).notices)
    session.scanned = report
    session.use_recipe(de.Recipe.of([de.Rule.parse("*.kv_cache.{k,v}=fp8"), de.Rule.parse("*.0.*.ssm_state=bf16")]))
    with pytest.raises(de.UserError, match=r"layers\.0\.mamba\.kv_cache\.ssm_state in bfloat16 has no score"):
        session.predict()
    constraints = Constraints(only=(("*.ssm_state", ("kv:float16",)),), context=CONTEXT)
    found = session.search(budget=None, max_drift=1e9, constraints=constraints, measure=True)
    assert {form for name, form in session.plan.caches.items() if name.endswith("ssm_state")} == {"float16"}
    assert found.measured is not None
    assert any("the prediction leaves out 2 recurrent states" in notice for notice in found.notices)
    with pytest.raises(de.UserError, match="only states of recurrences can"):
        session.scan(("kv:f16@stochastic",))


def test_scan_of_a_model_with_states_alone_is_refused_with_the_reason() -> None:
    module, inputs = architectures.make("mamba")
    with pytest.raises(de.UserError, match="the model keeps recurrent states alone, which are not scored"):
        de.open(module, inputs=inputs).scan(("kv:fp8",))
