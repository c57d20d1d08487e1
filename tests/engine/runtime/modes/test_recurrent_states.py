"""States of recurrent layers in another format, against a loop of plain transformers that rounds them by hand after each token."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import dtype_engine as de
from dtype_engine.core.errors import Cancelled
from dtype_engine.core.execution import PLAIN
from dtype_engine.runtime.execution.executor import Executor
from dtype_engine.runtime.passes.forward_pass import ModuleObserver
from dtype_engine.runtime.passes.one_pass import PassOptions
from dtype_engine.runtime.passes.runner import ForwardRunner

VOCABULARY, TOKENS = 64, 28
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_NO_HEADS = {key: value for key, value in _SMALL.items() if "heads" not in key and key != "intermediate_size"}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_KIMI = {
    **_SMALL, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 3, "linear_head_dim": 8, "linear_num_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mamba": ("Mamba", {**_NO_HEADS, "state_size": 8}),
    "Mamba 2": ("Mamba2", {**_NO_HEADS, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8}),
    "Jamba": ("Jamba", {**_SMALL, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False,
                        "mamba_d_state": 8}),
    "Qwen3-Next": ("Qwen3Next", {**_SMALL, **_DELTA, "head_dim": 8, "moe_intermediate_size": 8, "num_experts": 4,
                                 "shared_expert_intermediate_size": 8, "num_experts_per_tok": 2,
                                 "layer_types": ["linear_attention", "full_attention"]}),
    "Kimi Linear": ("KimiLinear", _KIMI),
    "Falcon-H1": ("FalconH1", {**_SMALL, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8,
                               "mamba_d_ssm": 64}),
    "MiniMax": ("MiniMax", {**_SMALL, "head_dim": 8, "num_local_experts": 2, "block_size": 4}),
    "RecurrentGemma": ("RecurrentGemma", {**_SMALL, "num_hidden_layers": 3, "head_dim": 8, "lru_width": 32,
                                          "attention_window_size": 5}),
    "RWKV": ("Rwkv", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 1,
                      "eos_token_id": 2}),
    "LFM2": ("Lfm2", {**_SMALL, "full_attn_idxs": [1]}),
}  # fmt: skip
"""The class of each model in transformers, without the end of its name, and its configuration."""
PARTS = ("ssm_state", "conv_state")
WITHOUT = {("MiniMax", "conv_state"), ("LFM2", "ssm_state")}
"""States that a model does not have."""

Rounds = Callable[[torch.Tensor], torch.Tensor]


def _rounds(dtype: Any) -> Rounds:
    """A rounding by numpy, which does not use torch's casts."""

    def rounds(state: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(state.float().numpy().astype(dtype).astype(np.float32)).to(state.dtype)

    return rounds


ROUNDS: dict[str, Rounds] = {"bf16": _rounds(ml_dtypes.bfloat16), "f16": _rounds(np.float16)}


@dataclass
class Case:
    """A model on the disk, opened by this program, and by plain transformers."""

    name: str
    folder: Path
    session: de.Session
    ids: list[torch.Tensor]

    def plain(self) -> Any:
        """The model as plain transformers loads it. A new one for each text, since some models keep states in their modules."""
        family, _ = MODELS[self.name]
        return getattr(transformers, f"{family}ForCausalLM").from_pretrained(self.folder, dtype=torch.float32).eval()


def _made(name: str) -> Any:
    family, settings = MODELS[name]
    torch.manual_seed(0)
    module = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**settings)).eval()
    with torch.no_grad():
        for key, value in module.named_parameters():  # larger than at random, so that what a state holds matters
            if any(word in key for word in ("dt_", "x_proj", "conv", "in_proj", "linear_")):
                value.mul_(2)
    return module


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return _opened(request.param, _made(request.param), tmp_path_factory.mktemp("model"))


def _opened(name: str, module: nn.Module, folder: Path) -> Case:
    module.save_pretrained(folder)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, VOCABULARY, (1, length), generator=generator) for length in (TOKENS, TOKENS - 9)]
    session = de.open(
        str(folder), options=de.Options(device="cpu", threads=1), inputs=[{"input_ids": each} for each in ids]
    )
    return Case(name, folder, session, ids)


_CACHES = ("cache", "past_key_values", "cache_params", "state")


def states_of(module: Any, cache: Any, part: str, layer: int | None = None) -> list[torch.Tensor]:
    """The states that a model keeps, of all layers or of one, found in the way of each model."""
    if isinstance(cache, list):  # RWKV's list, whose last dimension is the layer
        found = cache[2:] if part == "ssm_state" else cache[:2]
        return [each if layer is None else each[:, :, layer] for each in found]
    held = list(enumerate(getattr(cache, "layers", ())))
    attribute = "recurrent_states" if part == "ssm_state" else "conv_states"
    found = [each for index, at in held if layer in (None, index) for each in dict(getattr(at, attribute, {})).values()]
    if part == "ssm_state":
        found += [each for each in getattr(cache, "linear_cache", ()) if isinstance(each, torch.Tensor)]
    for block in module.modules():
        if type(block).__name__ == "RecurrentGemmaRecurrentBlock":
            found.append(block.rg_lru.recurrent_states if part == "ssm_state" else block.conv1d_state)
    return [each for each in found if each is not None]


def _argument(module: Any) -> str:
    return next(name for name in _CACHES if name in inspect.signature(module.forward).parameters)


def _step(module: Any, ids: torch.Tensor, cache: Any, rounds: Mapping[str, Rounds], layer: int | None) -> Any:
    """Run a plain model, and round what it keeps. Returns (the logits of the last token, its cache)."""
    output = module(**{"input_ids": ids, _argument(module): cache, "use_cache": True})
    cache = next((kept for name in _CACHES if (kept := getattr(output, name, None)) is not None), cache)
    for part, by in rounds.items():
        for state in states_of(module, cache, part, layer):
            state.copy_(by(state))
    return output.logits[0, -1], cache


@torch.no_grad()
def decoded(
    module: Any, ids: torch.Tensor, rounds: Mapping[str, Rounds] = MappingProxyType({}), layer: int | None = None
) -> torch.Tensor:
    """The log-probabilities of each token [positions, classes], float64, of a plain model that decodes token by token. rounds: the
    roundings of its states, by part.
    """
    cache = transformers.DynamicCache(config=module.config) if module.config.model_type == "recurrent_gemma" else None
    logits = []
    for at in range(ids.shape[1]):
        last, cache = _step(module, ids[:, at : at + 1], cache, rounds, layer)
        logits.append(last)
    return torch.log_softmax(torch.stack(logits).double(), -1)


@torch.no_grad()
def written(module: Any, prompt: torch.Tensor, count: int, rounds: Mapping[str, Rounds]) -> list[int]:
    """The tokens with which a plain model continues a prompt by greedy decoding."""
    last, cache = _step(module, prompt, None, rounds, None)
    found = [int(last.argmax())]
    while len(found) < count and found[-1] != module.config.eos_token_id:
        last, cache = _step(module, torch.tensor([[found[-1]]]), cache, rounds, None)
        found.append(int(last.argmax()))
    return found


def kl_of(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    return (reference.exp() * (reference - candidate)).sum(-1)


@pytest.mark.parametrize("form", ROUNDS)
@pytest.mark.parametrize("part", PARTS)
def test_drift_equals_that_of_a_plain_loop_that_rounds_states_by_hand(case: Case, part: str, form: str) -> None:
    if (case.name, part) in WITHOUT:
        pytest.skip(f"{case.name} has no {part}")
    case.session.use_recipe(de.Recipe.of([de.Rule.parse(f"*.{part}={form}")]))
    report = case.session.drift()
    expected = torch.cat(
        [kl_of(decoded(case.plain(), ids), decoded(case.plain(), ids, {part: ROUNDS[form]})) for ids in case.ids]
    )
    assert float(expected.mean()) > 1e-9
    assert report.output.kl_mean == pytest.approx(float(expected.mean()), abs=1e-9, rel=1e-6)
    assert report.output.kl_max == pytest.approx(float(expected.max()), abs=1e-8, rel=1e-6)
    assert report.settings == "decode=yes, reference decode=yes"
    assert f"reference and candidate ran a pass for each of {2 * TOKENS - 9} tokens" in " ".join(report.notices)


def test_kl_of_each_position_equals_that_of_a_plain_loop(case: Case, tmp_path: Path) -> None:
    """Each token is at its own position: the errors of a state add up over the positions."""
    part = "conv_state" if case.name == "LFM2" else "ssm_state"
    case.session.use_recipe(de.Recipe.of([de.Rule.parse(f"*.{part}=bf16")]))
    saved = load_file(case.session.save_logits(tmp_path / "candidate.safetensors", "candidate"))
    for number, ids in enumerate(case.ids):
        plain = decoded(case.plain(), ids)
        found = torch.log_softmax(saved[f"logits.{number}"].reshape(ids.shape[1], -1).double(), -1)
        expected = kl_of(plain, decoded(case.plain(), ids, {part: ROUNDS["bf16"]}))
        assert torch.allclose(kl_of(plain, found), expected, rtol=1e-5, atol=1e-8)
        assert float(expected[0]) < 1e-12  # the first token reads no state


def test_states_in_their_own_dtype_have_no_drift(case: Case) -> None:
    for part in PARTS:
        if (case.name, part) not in WITHOUT:
            case.session.use_recipe(de.Recipe.of([de.Rule.parse(f"*.{part}=f32")]))
            assert case.session.drift().output.max_abs == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A Mamba 2 that has learned 20 steps of a text in which a token depends on those before it."""
    torch.manual_seed(0)
    module = _made("Mamba 2").train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for _ in range(20):
        start = torch.randint(3, VOCABULARY, (4, 1))
        text = 3 + (start - 3 + 5 * torch.arange(32)) % (VOCABULARY - 3)
        optimizer.zero_grad()
        module(text, labels=text, use_cache=False).loss.backward()
        optimizer.step()
    return _opened("Mamba 2", module.eval(), tmp_path_factory.mktemp("trained"))


def test_drift_of_a_trained_mamba_2_equals_that_of_a_plain_loop(trained: Case) -> None:
    trained.session.use_recipe(de.Recipe.of([de.Rule.parse("*.ssm_state=bf16"), de.Rule.parse("*.conv_state=f16")]))

    rounds = {"ssm_state": ROUNDS["bf16"], "conv_state": ROUNDS["f16"]}
    expected = torch.cat(
        [kl_of(decoded(trained.plain(), ids), decoded(trained.plain(), ids, rounds)) for ids in trained.ids]
    )
    assert trained.session.drift().output.kl_mean == pytest.approx(float(expected.mean()), abs=1e-9, rel=1e-6)


def test_rule_for_one_layer_rounds_no_other_layer(trained: Case) -> None:
    for layer in range(2):
        trained.session.use_recipe(de.Recipe.of([de.Rule.parse(f"*.layers.{layer}.*.ssm_state=bf16")]))
        expected = torch.cat(
            [
                kl_of(
                    decoded(trained.plain(), ids), decoded(trained.plain(), ids, {"ssm_state": ROUNDS["bf16"]}, layer)
                )
                for ids in trained.ids
            ]
        )
        assert trained.session.drift().output.kl_mean == pytest.approx(float(expected.mean()), abs=1e-12, rel=1e-6)


def test_outputs_of_a_file_are_compared_with_a_candidate_that_decodes(trained: Case, tmp_path: Path) -> None:
    file = trained.session.save_logits(tmp_path / "reference.safetensors")
    options = de.Options(device="cpu", threads=1, reference_logits=file)
    given = de.open(str(trained.folder), options=options)
    for session in (given, trained.session):
        session.use_recipe(de.Recipe.of([de.Rule.parse("*.conv_state=bf16")]))
    report = given.drift()
    assert report.output.kl_mean == pytest.approx(trained.session.drift().output.kl_mean, abs=1e-9, rel=1e-3)
    assert f"the candidate ran a pass for each of {2 * TOKENS - 9} tokens" in " ".join(report.notices)


def test_causes_measure_the_states_of_each_layer_alone(trained: Case) -> None:
    trained.session.use_recipe(de.Recipe.of([de.Rule.parse("*.ssm_state=bf16"), de.Rule.parse("*.embeddings=fp8")]))
    causes = {cause.name: cause.drift for cause in trained.session.causes().causes}
    assert len(causes) == 3
    for layer in range(2):
        expected = torch.cat(
            [
                kl_of(
                    decoded(trained.plain(), ids), decoded(trained.plain(), ids, {"ssm_state": ROUNDS["bf16"]}, layer)
                )
                for ids in trained.ids
            ]
        )
        found = causes[f"backbone.layers.{layer}.mixer.kv_cache.ssm_state"]
        assert found == pytest.approx(float(expected.mean()), abs=1e-12, rel=1e-6)


def test_drift_without_rounded_states_is_not_measured_token_by_token_afterwards(trained: Case) -> None:
    """The outputs of the reference are those of the same execution as the candidate's, whatever was measured before."""
    weights = de.Recipe.of([de.Rule.parse("*.in_proj=bf16")])
    trained.session.use_recipe(weights)
    before = trained.session.drift()
    trained.session.use_recipe(weights.then(de.Rule.parse("*.ssm_state=bf16")))
    between = trained.session.drift()
    trained.session.use_recipe(weights)
    after = trained.session.drift()
    assert (before.settings, between.settings) == ("defaults", "decode=yes, reference decode=yes")
    assert after.output.kl_mean == before.output.kl_mean != between.output.kl_mean
    assert not any("a pass for each" in notice for notice in after.notices)


def test_generated_text_is_that_of_a_plain_loop_that_rounds_states(tmp_path: Path) -> None:
    case = _opened("Falcon-H1", _made("Falcon-H1"), tmp_path)
    prompt = case.ids[0][:, :12]
    session = de.open(str(tmp_path), options=de.Options(device="cpu", threads=1), inputs=[{"input_ids": prompt}])
    session.use_recipe(de.Recipe.of([de.Rule.parse("*.kv_cache.{ssm,conv}_state=bf16")]))
    (text,) = session.generate(tokens=64)
    rounds = dict.fromkeys(PARTS, ROUNDS["bf16"])
    assert list(text.reference.ids) == written(case.plain(), prompt, 64, {})
    assert list(text.candidate.ids) == written(case.plain(), prompt, 64, rounds)
    assert text.candidate.ids != text.reference.ids


def test_stochastic_rounding_repeats_and_gives_neighbours_in_float16(trained: Case) -> None:
    trained.session.use_recipe(de.Recipe.of([de.Rule.parse("*.ssm_state=f16@stochastic")]))
    first = trained.session.drift().output.kl_mean
    module: Any = trained.session.model.module
    computed, pairs = list[torch.Tensor](), list[tuple[torch.Tensor, torch.Tensor]]()

    def before(module: nn.Module, args: Any, given: dict[str, Any]) -> None:
        if given[_CACHES[0]] is not None:
            pairs.append((computed[-1], states_of(module, given[_CACHES[0]], "ssm_state")[0].clone()))

    def after(module: nn.Module, args: Any, output: Any) -> None:  # called before the state is rounded
        computed.append(states_of(module, output.cache, "ssm_state")[0].clone())

    hooks = [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        again = trained.session.drift().output.kl_mean
    finally:
        for hook in hooks:
            hook.remove()
    assert again == first
    assert first is not None
    assert first > 0
    ups = 0
    for exact, rounded in pairs:
        nearest = exact.numpy().astype(np.float16)
        other = np.nextafter(nearest, np.where(exact.numpy() > nearest, np.inf, -np.inf).astype(np.float16))
        low, high = np.minimum(nearest, other), np.maximum(nearest, other)
        found = rounded.numpy().astype(np.float16)
        assert np.array_equal(found, rounded.numpy())
        assert np.all((found == low) | (found == high))
        ups += int((found != nearest).sum())
    assert ups > 0  # some are rounded to the neighbour that is further away
    trained.session.use_recipe(de.Recipe.of([de.Rule.parse("*.ssm_state=f16")]))
    assert trained.session.drift().output.kl_mean != first


def test_values_beyond_float16_are_named(tmp_path: Path) -> None:
    module = _made("Mamba 2")
    with torch.no_grad():
        module.backbone.layers[1].mixer.in_proj.weight.mul_(1000)
    case = _opened("Mamba 2", module, tmp_path)
    for form, count in (("f16", 1), ("f16@stochastic", 1), ("bf16", 0)):
        case.session.use_recipe(de.Recipe.of([de.Rule.parse(f"*.ssm_state={form}")]))
        report = case.session.drift()
        told = [notice for notice in report.notices if "beyond the largest of float16" in notice]
        assert len(told) == count
        assert bool(report.output.nonfinite_candidate) == bool(count)
        assert all("1 recurrent state, first backbone.layers.1.mixer.kv_cache.ssm_state" in notice for notice in told)


def test_tokens_of_a_batch_can_not_be_measured_one_by_one(trained: Case) -> None:
    ids = torch.cat([trained.ids[0]] * 2)
    session = de.open(str(trained.folder), options=de.Options(device="cpu"), inputs=[{"input_ids": ids}])
    session.use_recipe(de.Recipe.of([de.Rule.parse("*.ssm_state=bf16")]))
    with pytest.raises(de.UserError, match="a model with rounded recurrent states runs one sequence at a time"):
        session.drift()
    trained.session.settings = de.RunSettings(execution=de.Execution(batch=2))
    try:
        with pytest.raises(de.UserError, match="one sequence at a time: leave batch out"):
            trained.session.drift()
    finally:
        trained.session.settings = de.RunSettings()


def test_measurement_reports_its_tokens_and_stops_between_them(trained: Case) -> None:
    trained.session.use_recipe(de.Recipe.of([de.Rule.parse("*.conv_state=bf16")]))
    module: Any = trained.session.model.module
    calls: list[int] = []
    hook = module.register_forward_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(Cancelled):
            trained.session.drift(cancelled=lambda: len(calls) > 5)
    finally:
        hook.remove()
    assert len(calls) == 6

    class Steps(ModuleObserver):
        """Remembers what it is told about the tokens."""

        def __init__(self) -> None:
            self.told: list[tuple[int, int]] = []

        def begin_step(self, done: int, steps: int) -> None:
            self.told.append((done, steps))

    steps = Steps()
    with ForwardRunner(trained.session.model, de.RunSettings(), lambda: False) as runner:
        executor = Executor(runner, trained.session.need_inputs().batches)
        executor.run("candidate", PLAIN, 0, PassOptions(), steps)
    assert steps.told == [(done, TOKENS) for done in range(TOKENS)]


def test_keys_in_another_format_are_rounded_beside_the_states(tmp_path: Path) -> None:
    """In a model that has both: Jamba, with keys rounded where they are written."""
    case = _opened("Jamba", _made("Jamba"), tmp_path)
    case.session.use_recipe(de.Recipe.of([de.Rule.parse("*.kv_cache.{k,ssm_state}=bf16")]))

    class Rounding(transformers.DynamicCache):  # type: ignore[misc]
        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
            return super().update(ROUNDS["bf16"](key_states), value_states, *rest, **named)

    expected = []
    for ids in case.ids:
        module, logits = case.plain(), []
        cache = Rounding(config=module.config)
        with torch.no_grad():
            for at in range(ids.shape[1]):
                rounds = {"ssm_state": ROUNDS["bf16"]}
                logits.append(_step(module, ids[:, at : at + 1], cache, rounds, None)[0])
        expected.append(kl_of(decoded(case.plain(), ids), torch.log_softmax(torch.stack(logits).double(), -1)))
    found = case.session.drift().output.kl_mean
    assert found == pytest.approx(float(torch.cat(expected).mean()), abs=1e-9, rel=1e-6)
    assert found > 1e-7


def test_states_of_a_bfloat16_model_are_rounded_in_their_own_dtype(tmp_path: Path) -> None:
    """Its convolutions keep what they are given, in bfloat16; the recurrence stays in float32."""
    case = _opened("Mamba 2", _made("Mamba 2").bfloat16(), tmp_path)
    session = de.open(
        str(tmp_path),
        options=de.Options(device="cpu", threads=1, reference="stored"),
        inputs=[{"input_ids": case.ids[0]}],
    )
    session.use_recipe(de.Recipe.of([de.Rule.parse("*.conv_state=bf16")]))
    assert session.drift().output.max_abs == 0
    session.use_recipe(de.Recipe.of([de.Rule.parse("*.ssm_state=bf16")]))
    plain = transformers.Mamba2ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    expected = kl_of(decoded(plain, case.ids[0]), decoded(plain, case.ids[0], {"ssm_state": ROUNDS["bf16"]}))
    assert session.drift().output.kl_mean == pytest.approx(float(expected.mean()), abs=1e-9, rel=1e-6)


def test_model_that_keeps_its_state_elsewhere_is_refused(trained: Case) -> None:
    """A model whose calls return no cache with states, as one with code of its own might."""
    session = de.open(str(trained.folder), options=de.Options(device="cpu"), inputs=[{"input_ids": trained.ids[0]}])
    module: Any = session.model.module

    class Elsewhere:
        """Has nothing that this program knows."""

        def __init__(self, cache: Any) -> None:
            self.held = cache

        def __getattr__(self, name: str) -> Any:
            if name == "layers":
                raise AttributeError(name)
            return getattr(self.held, name)

    def hide(module: nn.Module, args: Any, output: Any) -> Any:
        output.cache = Elsewhere(output.cache)
        return output

    hook = module.register_forward_hook(hide)
    session.use_recipe(de.Recipe.of([de.Rule.parse("*.ssm_state=bf16")]))
    try:
        with pytest.raises(de.NoForward, match=r"ssm_state was not written in the pass"):
            session.drift()
    finally:
        hook.remove()
