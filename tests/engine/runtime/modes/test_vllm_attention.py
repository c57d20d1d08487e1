"""KV caches and queries in the formats of vLLM, against a Llama and a Mistral that are written here in plain torch, and whose
attention rounds and rotates as vLLM's kernels do: queries are rotated, and keys are never rotated back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from tests.helpers import architectures, vllm_caches
from tests.helpers.measured_on import DEVICE
from torch.nn import functional

import dtype_engine as de
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.recipe import make_plan
from dtype_engine.recipe.kv_serving import cache_serving
from dtype_engine.runtime.device import has_float64
from dtype_engine.runtime.numerics.kv_rounding import round_cache, round_queries
from dtype_engine.runtime.numerics.rotations import hadamard, signed_hadamard, undo_signed_hadamard

IDS = (torch.arange(2 * 40).reshape(2, 40) * 13 + 5) % 61
QUERY_HEADS, HEADS, WIDTH, WINDOW = 4, 2, 32, 12
CLOSE = {"rel": 0, "abs": 1e-9 if DEVICE == "cpu" else 1e-7}
"""The expected figures are the CPU's. On another device, the norms, which are float32, differ in the last bits."""
Tensor = torch.Tensor
Attend = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]]
"""Gets (layer, queries, keys, values), and returns those with which attention computes, and what its result goes through."""
CONFIG = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": QUERY_HEADS,
    "num_key_value_heads": HEADS, "head_dim": WIDTH, "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request: pytest.FixtureRequest) -> Any:
    if not has_float64(torch.device(DEVICE)):
        pytest.skip(f"only on another device: {DEVICE} lacks float64")
    torch.manual_seed(1)
    if request.param == "llama":
        made: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    else:
        made = transformers.MistralForCausalLM(transformers.MistralConfig(sliding_window=WINDOW, **CONFIG))
    return made.double().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def session(folder: str) -> de.Session:
    return de.open(folder, inputs={"input_ids": IDS})


def _log_p(model: Any, attend: Attend) -> Tensor:
    """Return the log-probabilities of a Llama or Mistral, in float64 but for norms and rotary factors, as in transformers."""
    weights = {name: each.double() for name, each in model.state_dict().items()}
    tokens = IDS.shape[1]
    frequencies = 1 / (10000 ** (torch.arange(0, WIDTH, 2).float() / WIDTH))
    angles = (torch.arange(tokens).float()[:, None] * frequencies).repeat(1, 2)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    window = WINDOW if "Mistral" in type(model).__name__ else tokens
    hidden = (distance < 0) | (distance >= window)

    def norm(x: Tensor, name: str) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + model.config.rms_norm_eps)
        return y.double() * weights[f"{name}.weight"]

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, WIDTH)).transpose(1, 2)

    def rotary(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * angles.cos().double() + torch.cat([-second, first], -1) * angles.sin().double()

    x = weights["model.embed_tokens.weight"][IDS]
    for layer in range(CONFIG["num_hidden_layers"]):  # type: ignore[call-overload]
        at = f"model.layers.{layer}"
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (heads(y @ weights[f"{at}.self_attn.{part}_proj.weight"].T) for part in "qkv")
        q, k, v, after = attend(layer, rotary(q), rotary(k), v)
        k, v = (each.repeat_interleave(QUERY_HEADS // HEADS, 1) for each in (k, v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH)).masked_fill(hidden, -math.inf)
        attended = after(torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)
        x = x + attended @ weights[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm")
        gate, up, down = (weights[f"{at}.mlp.{part}_proj.weight"].T for part in ("gate", "up", "down"))
        x = x + (functional.silu(y @ gate) * (y @ up)) @ down
    return torch.log_softmax(norm(x, "model.norm") @ weights["lm_head.weight"].T, -1)


def _plainly(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return q, k, v, lambda x: x


def _kl(model: Any, attend: Attend) -> float:
    before, after = _log_p(model, _plainly), _log_p(model, attend)
    return float((before.exp() * (before - after)).sum(-1).mean())


def _fp8(x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    rounded = (x.float() / scale).clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return (torch.from_numpy(rounded) * scale).double()


def _by_numpy(rounds: Callable[[Any], Any], x: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(rounds(x.float().numpy()), np.float64))


def _amax_of(model: Any) -> dict[tuple[int, int], Tensor]:
    """The largest |value| of each head's keys (0) and values (1) in each layer of the unrounded model."""
    found: dict[tuple[int, int], Tensor] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
        found.update({(layer, part): x.float().abs().amax((0, 2, 3)) for part, x in enumerate((k, v))})
        return _plainly(layer, q, k, v)

    _log_p(model, attend)
    return found


def _with_queries(form: str, amax: dict[tuple[int, int], Tensor]) -> Attend:
    def scale(layer: int, part: int) -> Tensor | float:
        if form == "fp8+q":
            return 1.0
        of_heads = amax[layer, part] / 448
        return of_heads[:, None, None] if form == "fp8@head+q" else of_heads.max()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return _fp8(q), _fp8(k, scale(layer, 0)), _fp8(v, scale(layer, 1)), lambda x: x

    return attend


@pytest.mark.parametrize("form", ["fp8+q", "fp8@tensor+q", "fp8@head+q"])
def test_drift_with_rounded_queries_equals_that_of_a_hand_written_attention(
    model: Any, session: de.Session, form: str
) -> None:
    expected = _kl(model, _with_queries(form, _amax_of(model)))
    session.use_recipe(de.Recipe.of([de.Rule.make("*.kv_cache", form)]))
    assert session.drift().output.kl_mean == pytest.approx(expected, **CLOSE)
    assert expected > 1e-4
    session.use_recipe(de.Recipe.of([de.Rule.make("*.kv_cache", form.removesuffix("+q"))]))
    unrounded = session.drift().output.kl_mean
    assert unrounded is not None
    assert abs(unrounded - expected) > expected / 100


def test_queries_of_sequences_that_run_side_by_side_are_rounded_in_each(model: Any, folder: str) -> None:
    expected = _kl(model, _with_queries("fp8+q", {}))
    apart = de.open(folder, inputs=[{"input_ids": ids[None]} for ids in IDS])
    apart.cast("*.kv_cache", "fp8+q")
    assert apart.drift().output.kl_mean == pytest.approx(expected, **CLOSE)


def _int4(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
    matrix, count = vllm_caches.signed_hadamard(WIDTH)
    turn = torch.from_numpy(matrix)
    k, v = (_by_numpy(vllm_caches.int4_rotated, (x.float().double() @ turn).float()) for x in (k, v))
    return q @ turn / count, k, v, lambda x: x @ turn.T / count


def _turboquant(bits: int, value_bits: int) -> Attend:
    turn = torch.from_numpy(vllm_caches.hadamard(WIDTH) / math.sqrt(WIDTH))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
        k = _by_numpy(lambda x: vllm_caches.turboquant_keys_rotated(x, bits), k)
        return q @ turn, k, _by_numpy(lambda x: vllm_caches.turboquant_values(x, value_bits), v), lambda x: x

    return attend


ROTATED: dict[str, Attend] = {
    "int4@token": _int4,
    "tq@k4v4": _turboquant(4, 4),
    "tq@k3v4": _turboquant(3, 4),
    "tq@k3v3": _turboquant(3, 3),
}


@pytest.mark.parametrize("form", ROTATED)
def test_drift_of_rotated_caches_equals_that_of_an_attention_with_rotated_queries(
    model: Any, session: de.Session, form: str
) -> None:
    expected = _kl(model, ROTATED[form])
    session.use_recipe(de.Recipe.of([de.Rule.make("*.kv_cache", form)]))
    # Rotations in float32 differ in the last bits. A key of TurboQuant between two codes may get the other one by this.
    assert session.drift().output.kl_mean == pytest.approx(expected, rel=1e-6 if form == "int4@token" else 1e-4)
    assert expected > 1e-3


def test_causes_count_rounded_queries_with_the_keys(model: Any, session: de.Session) -> None:
    """Alone, the keys of a layer round its queries as well; its values do not."""

    def alone(layer: int, part: str) -> float:
        def attend(at: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
            if at != layer:
                return _plainly(at, q, k, v)
            return (_fp8(q), _fp8(k), v, lambda x: x) if part == "k" else (q, k, _fp8(v), lambda x: x)

        return _kl(model, attend)

    session.use_recipe(de.Recipe.of([de.Rule.parse("*.kv_cache=fp8+q")]))
    shares = {cause.name: cause.drift for cause in session.causes().causes}
    for layer in range(3):
        for part in "kv":
            name = f"model.layers.{layer}.self_attn.kv_cache.{part}"
            assert shares[name] == pytest.approx(alone(layer, part), **CLOSE), name


def test_rounded_queries_raise_estimated_scores_of_keys_as_they_raise_exact_scores(session: de.Session) -> None:
    forms = ("kv:fp8", "kv:fp8+q")
    estimated, exact = session.scan(forms).scores(), session.scan(forms, exact=True).scores()
    keys = [name for name in session.tree.caches if name.endswith(".k")]
    assert len(keys) == 3
    for name in keys:
        ratios = [scores[name, "kv:fp8+q"] / scores[name, "kv:float8_e4m3fn"] for scores in (estimated, exact)]
        assert ratios[0] == pytest.approx(ratios[1], rel=0.2), name
        assert min(ratios) > 1.5
    for name in (name for name in session.tree.caches if name.endswith(".v")):
        assert estimated[name, "kv:fp8+q"] == pytest.approx(estimated[name, "kv:float8_e4m3fn"])


@pytest.fixture
def attention_in_fp8() -> str:
    """The name of an attention of transformers that rounds queries, keys and values to fp8 by itself."""
    name, sdpa = "fp8_by_hand", transformers.AttentionInterface()["sdpa"]

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Any:
        return sdpa(module, *(_fp8(x.cpu()).to(x) for x in (q, k, v)), *rest, **named)

    transformers.AttentionInterface.register(name, attend)
    transformers.AttentionMaskInterface.register(name, transformers.AttentionMaskInterface()["sdpa"])
    return name


def test_queries_of_layers_that_read_another_layers_keys_are_rounded(attention_in_fp8: str) -> None:
    """In Gemma 3n, whose last layers write no keys of their own."""
    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(
        vocab_size=61, vocab_size_per_layer_input=61, hidden_size=32, hidden_size_per_layer_input=8, intermediate_size=48,
        num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_kv_shared_layers=2, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2, laurel_rank=4, altup_num_inputs=2, initializer_range=0.2,
        activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    module: Any = transformers.Gemma3nForCausalLM(config).eval().requires_grad_(False)
    session = de.open(module, inputs={"input_ids": IDS})
    session.cast("*.kv_cache", "fp8+q")
    measured = session.drift().output.kl_mean
    estimated, exact = (session.scan(["kv:fp8", "kv:fp8+q"], exact=each).scores() for each in (False, True))
    module = session.model.module
    before = module(IDS.to(DEVICE)).logits.double().cpu().log_softmax(-1)
    module.set_attn_implementation(attention_in_fp8)
    after = module(IDS.to(DEVICE)).logits.double().cpu().log_softmax(-1)
    assert measured == pytest.approx(float((before.exp() * (before - after)).sum(-1).mean()), rel=1e-4)
    for layer in (0, 1):
        name = f"model.layers.{layer}.self_attn.kv_cache.k"
        ratios = [scores[name, "kv:fp8+q"] / scores[name, "kv:float8_e4m3fn"] for scores in (estimated, exact)]
        assert ratios[0] == pytest.approx(ratios[1], rel=0.3)


def test_notice_says_that_values_alone_round_no_queries(session: de.Session) -> None:
    session.use_recipe(de.Recipe.of([de.Rule.parse("*.kv_cache.v=fp8+q")]))
    report = session.drift()
    name = "model.layers.0.self_attn.kv_cache.v"
    assert f"{name} is fp8+q, but queries are only rounded where the keys are fp8+q, too" in report.notices
    session.use_recipe(de.Recipe.of([de.Rule.parse("*.kv_cache.v=fp8")]))
    assert session.drift().output.kl_mean == report.output.kl_mean
    assert not session.drift().notices


def test_interface_of_transformers_is_restored_after_a_pass(session: de.Session) -> None:
    interface = transformers.AttentionInterface.get_interface
    session.use_recipe(de.Recipe.of([de.Rule.parse("*.kv_cache=fp8+q")]))
    assert session.drift().output.max_abs > 0
    assert transformers.AttentionInterface.get_interface is interface


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_of_rotated_int4_equal_those_of_the_formulas(dtype: torch.dtype) -> None:
    """Of whole numbers, whose rotation is exact in float32."""
    generator = torch.Generator().manual_seed(3)
    for width in (32, 24, 48, 10):
        x = torch.randint(-31, 32, (2, 3, 7, width), generator=generator).to(dtype)
        matrix, count = vllm_caches.signed_hadamard(width)
        turned = torch.from_numpy(x.double().numpy() @ matrix).to(dtype).float().numpy()
        expected = vllm_caches.int4_rotated(turned) @ matrix.T / count
        found = round_cache(x, "int4@token", True).double().numpy()
        rounded = torch.from_numpy(expected).to(dtype).double().numpy()
        np.testing.assert_allclose(found, rounded, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.25)
        # Rotated again, the values are whole codes times the scale of their row.
        assert len(np.unique(np.round((expected @ matrix)[0, 0, 0], 3))) <= 16


@pytest.mark.parametrize(("name", "keys", "values"), [("tq@k4v4", 4, 4), ("tq@k3v3", 3, 3)])
def test_values_of_turboquant_equal_those_of_the_formulas(name: str, keys: int, values: int) -> None:
    x = torch.randn((2, 2, 50, 64), generator=torch.Generator().manual_seed(4)) * 3
    found = round_cache(x, name, True).numpy()
    np.testing.assert_allclose(found, vllm_caches.turboquant_keys(x.numpy(), keys), rtol=0, atol=1e-5)
    # Norm correction: what is read has the norm of the key.
    np.testing.assert_allclose(np.linalg.norm(found, axis=-1), np.linalg.norm(x.numpy(), axis=-1), rtol=1e-3)
    found = round_cache(x, name, False).numpy()
    np.testing.assert_allclose(found, vllm_caches.turboquant_values(x.numpy(), values), rtol=0, atol=1e-6)
    assert all(len(np.unique(row)) <= 2**values for row in found.reshape(-1, 64))


def test_rotation_leaves_its_argument_as_it_is() -> None:
    for shape in ((1, 8), (3, 8), (5, 1), (2, 3, 12)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(6))
        before = x.clone()
        turned = signed_hadamard(x)
        matrix, _ = vllm_caches.signed_hadamard(shape[-1])
        np.testing.assert_allclose(turned.numpy(), x.double().numpy() @ matrix, rtol=0, atol=1e-5)
        np.testing.assert_allclose(undo_signed_hadamard(turned).numpy(), before.numpy(), rtol=0, atol=1e-6)
        hadamard(x[..., :1])
        assert torch.equal(x, before)


def test_values_that_are_not_finite_stay_in_every_format() -> None:
    x = torch.randn((1, 1, 4, 32), generator=torch.Generator().manual_seed(5))
    x[0, 0, 1, 3], x[0, 0, 2, 5] = math.inf, math.nan
    for name in (*ROTATED, "tq@k8v4"):
        for keys in (True, False):
            found = round_cache(x, name, keys)
            assert bool((torch.isfinite(found) == torch.isfinite(x)).all()), name
            assert float(found[0, 0, 1, 3]) == math.inf
    asked = round_queries(x)
    assert float(asked[0, 0, 1, 3]) == math.inf
    assert math.isnan(float(asked[0, 0, 2, 5]))


def test_zeros_and_equal_values_are_read_as_such() -> None:
    for name in (*ROTATED, "tq@k8v4"):
        zeros, equal = torch.zeros(1, 1, 3, 32), torch.full((1, 1, 3, 32), -2.5)
        assert not round_cache(zeros, name, True).any()
        assert float(round_cache(zeros, name, False).abs().max()) < 1e-5
        np.testing.assert_allclose(round_cache(equal, name, False).numpy(), equal.numpy(), rtol=1e-5, err_msg=name)


def test_model_with_an_attention_of_its_own_is_refused_for_rounded_queries() -> None:
    torch.manual_seed(0)
    config = transformers.MptConfig(d_model=64, n_heads=2, n_layers=2, vocab_size=61)
    own: Any = transformers.MptForCausalLM(config).eval()
    session = de.open(own, inputs={"input_ids": IDS})
    session.cast("*.kv_cache", "fp8")
    assert session.drift().output.max_abs > 0
    session.cast("*.kv_cache", "fp8+q")
    with pytest.raises(NoForward, match=r"the queries of transformer\.blocks\.0\.attn can't be rounded"):
        session.drift()
    with pytest.raises(NoForward, match="AttentionInterface: measure a format without \\+q"):
        session.scan(["kv:fp8+q"])


@pytest.mark.parametrize(
    ("architecture", "form", "reasons"),
    [
        ("deepseek_v3", "fp8", ["as on Hopper and Blackwell GPUs: that of latent attention is not measured"]),
        (
            "qwen3_next",
            "tq@k8v4",
            ["attends to unrounded keys and values"],
        ),  # vLLM rounds all, for other layers are recurrent
        (
            "gemma3",
            "tq@k8v4",
            ["attends to unrounded keys and values", "leaves the first and the last layer unrounded"],
        ),
    ],
)
def test_lint_knows_the_layers_that_vllm_leaves_unrounded(architecture: str, form: str, reasons: list[str]) -> None:
    module, arguments = architectures.make(architecture)
    tree = de.open(module, inputs=arguments).tree
    plan = make_plan(tree, de.Recipe.of([de.Rule.make("*.kv_cache", form)]))
    problems = cache_serving(tree, plan.caches, "vllm").problems
    assert len(problems) == len(reasons)
    assert all(reason in problem.why for problem, reason in zip(problems, reasons, strict=True))


def test_formats_that_a_cache_can_not_have_are_refused_with_the_reason() -> None:
    module, arguments = architectures.make("deepseek_v3")
    session = de.open(module, inputs=arguments)
    for form, why in (("fp8+q", "the queries of multi-head latent"), ("tq@k3v3", "vLLM has no TurboQuant")):
        with pytest.raises(UserError, match=rf"kv_cache\.latent can't be {form.replace('+', '.')}: {why}"):
            session.cast("*.kv_cache", form)
        with pytest.raises(UserError, match=why):
            session.scan([f"kv:{form}"])
