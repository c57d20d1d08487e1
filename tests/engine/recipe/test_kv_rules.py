"""Rules for KV caches: which patterns reach them, and which formats they may have."""

from __future__ import annotations

import pytest

from dtype_engine import Recipe, Rule
from dtype_engine.checkpoint.kv_cache import kv_cache
from dtype_engine.core.errors import UserError
from dtype_engine.core.kv_formats import KV_FORMATS, KVFormat, completions
from dtype_engine.core.tree import TensorInfo, Tree, from_tensors
from dtype_engine.recipe import make_plan, require_matches
from dtype_engine.recipe.state_words import state_notices

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
    "num_hidden_layers": 12,
}  # fmt: skip


@pytest.fixture(scope="module")
def tree() -> Tree:
    names = [
        f"model.layers.{layer}.{part}.weight"
        for layer in range(12)
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.v")
    ]
    tree = from_tensors(TensorInfo(name, (32 if name.endswith(("k_proj.weight", "v_proj.weight")) else 64, 64), "bfloat16")
                        for name in names)  # fmt: skip
    tree.kv_cache = kv_cache(tree, CONFIG)
    return tree


def _reached(tree: Tree, *rules: str) -> dict[str, str]:
    return dict(make_plan(tree, Recipe.of(map(Rule.parse, rules))).caches)


@pytest.mark.parametrize("pattern", ["*=bf16", "*.self_attn=fp8", "model.layers.3=f16", "type:Linear=fp8", "*.?=bf16"])
def test_pattern_of_modules_or_weights_matches_no_kv_cache(tree: Tree, pattern: str) -> None:
    assert _reached(tree, pattern) == {}


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("*.kv_cache", 24), ("*.kv_cache.*", 24), ("*.kv_cache.k", 12), ("*.kv_cache.{k,v}", 24), ("*.k", 12), ("*.v", 12),
        ("*.{0..7}.*.kv_cache.k", 8), ("model.layers.1.self_attn.kv_cache", 2), ("re:.*\\.1[01]\\..*kv_cache.*", 4),
    ],
)  # fmt: skip
def test_kv_caches_are_selected_by_patterns_for_the_cache_its_keys_or_its_values(
    tree: Tree, pattern: str, count: int
) -> None:
    plan = make_plan(tree, Recipe.of([Rule.make(pattern, "fp8")]))
    assert len(plan.caches) == count
    assert plan.planned_bytes == plan.stored_bytes or pattern == "*.v"
    assert not plan.unmatched


def test_last_rule_that_matches_a_kv_cache_decides_its_format(tree: Tree) -> None:
    reached = _reached(tree, "*.kv_cache=fp8", "*.kv_cache.k=bf16", "*.0.*.kv_cache=stored", "*=bf16")
    assert "model.layers.0.self_attn.kv_cache.k" not in reached
    assert reached["model.layers.10.self_attn.kv_cache.k"] == "bfloat16"
    assert reached["model.layers.10.self_attn.kv_cache.v"] == "float8_e4m3fn"


def test_rule_with_a_kv_cache_format_casts_no_weight(tree: Tree) -> None:
    plan = make_plan(tree, Recipe.of([Rule.parse("*.v=int4@token")]))
    assert len(plan.caches) == 12
    assert set(plan.dtypes.values()) == {"bfloat16"}
    assert len(make_plan(tree, Recipe.of([Rule.parse("*.v=mxfp4")])).caches) == 0


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("*.kv_cache=int9", "a KV cache can't be 'int9'"),
        ("*.kv_cache=mxfp4", "a KV cache can't be 'mxfp4'"),
        ("*.kv_cache=int8", "did you mean int8@token?"),
        ("*.mlp=int4@kivi", "only KV caches can be int4@kivi: write a pattern that names them"),
        ("*=fp8@head", "only KV caches can be fp8@head"),
        ("*.mlp=fp8+q", "only KV caches can be fp8+q"),
        (
            "*.kv_cache=fp8e5+q",
            "the formats with which queries are rounded are fp8+q, fp8@tensor+q, fp8@head+q, nvfp4+q",
        ),
        ("*.kv_cache=fp8+q+q", "a KV cache can't be 'fp8+q+q'"),
        ("*.kv_cache=int9+q", "a KV cache can't be 'int9'"),
        ("*.kv_cache=nvfp4_4over6", "a KV cache in nvfp4_4over6 can't be measured: vLLM has it, and chooses"),
        ("*.kv_cache=FP8_DS_MLA", "a KV cache in fp8_ds_mla can't be measured: vLLM has it for sparse attention"),
        ("*.kv_cache=auto", "it is the dtype in which the model computes"),
    ],
)
def test_invalid_dtypes_for_kv_caches_and_weights_are_refused(rule: str, words: str) -> None:
    with pytest.raises(UserError) as raised:
        Rule.parse(rule)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("fp8", "float8_e4m3fn"), ("FP8@Tensor", "float8_e4m3fn@tensor"), ("e4m3@head", "fp8@head"), ("bf16", "bfloat16"),
        ("int8_per_token_head", "int8@token"), ("float8_e4m3fn@token", "fp8@token"), ("fp8e5", "float8_e5m2"),
        ("fp16@stochastic", "float16@stochastic"), ("e4m3+q", "fp8+q"), ("FP8@tensor+Q", "fp8@tensor+q"),
        ("fp8_e4m3", "float8_e4m3fn"), ("turboquant_k8v4", "tq@k8v4"), ("turboquant_4bit_nc", "tq@k4v4"),
        ("int4_per_token_head", "int4@token"),
    ],
)  # fmt: skip
def test_names_that_runtimes_give_to_kv_cache_formats_are_parsed(text: str, name: str) -> None:
    assert Rule.make("*.kv_cache", text).dtype == name


@pytest.mark.parametrize(
    ("name", "keys", "values"),
    [
        # [2 sequences, 4 heads, 300 tokens, 64 channels]: 2 * 4 * 300 * 64 = 153,600 values, 2,400 rows
        ("float16", 307200, 307200),
        ("float8_e4m3fn", 153600, 153600),
        ("float8_e4m3fn@tensor", 153604, 153604),
        ("fp8@head", 153616, 153616),
        ("fp8@token", 153600 + 4 * 2400, 153600 + 4 * 2400),
        ("int4@token", 76800 + 4 * 2400, 76800 + 4 * 2400),
        ("int4@g32", 76800 + 2 * 2 * 2400, 76800 + 2 * 2 * 2400),
        ("nvfp4", 76800 + 4 * 2400 + 4, 76800 + 4 * 2400 + 4),
        ("fp8@tensor+q", 153604, 153604),
        ("nvfp4+q", 76800 + 4 * 2400 + 4, 76800 + 4 * 2400 + 4),
        # a norm beside a row of keys, scale and minimum beside one of values, each in 2 bytes
        ("tq@k8v4", 153600, 2400 * (32 + 4)),
        ("tq@k4v4", 2400 * (32 + 2), 2400 * (32 + 4)),
        ("tq@k3v4", 2400 * (24 + 2), 2400 * (32 + 4)),
        ("tq@k3v3", 2400 * (24 + 2), 2400 * (24 + 4)),
        # 256 tokens of keys in 8 groups for each channel, 172 of values in 2 groups for each token; the rest in 16 bits
        ("int2@kivi", 8 * (256 * 16 + 8 * 64 * 4 + 44 * 128), 8 * (172 * 16 + 172 * 2 * 4 + 128 * 128)),
    ],
)
def test_bytes_of_kv_cache_formats_equal_hand_computed_values(name: str, keys: int, values: int) -> None:
    form: KVFormat = KV_FORMATS[name]
    shape = (2, 4, 300, 64)
    assert (form.nbytes(shape, keys=True), form.nbytes(shape, keys=False)) == (keys, values)


@pytest.mark.parametrize(("width", "fits"), [(64, True), (32, True), (96, False), (80, False), (4, False)])
def test_turboquant_is_refused_for_heads_that_vllm_can_not_rotate(width: int, fits: bool) -> None:
    of_width = CONFIG | {"head_dim": width, "num_hidden_layers": 1}
    attention = "model.layers.0.self_attn"
    tree = from_tensors(
        TensorInfo(f"{attention}.{part}_proj.weight", (heads * width, 64), "bfloat16")
        for part, heads in (("q", 4), ("k", 2), ("v", 2))
    )
    tree.kv_cache = kv_cache(tree, of_width)
    recipe = Recipe.of([Rule.parse("*.kv_cache=tq@k4v4")])
    if fits:
        assert len(require_matches(tree, recipe).caches) == 2
    else:
        with pytest.raises(UserError, match=rf"kv_cache\.k can't be tq@k4v4: .* these have {width} channels"):
            require_matches(tree, recipe)
    assert len(require_matches(tree, Recipe.of([Rule.parse("*.kv_cache=tq@k8v4")])).caches) == 2


def test_kv_cache_rule_for_a_model_without_a_cache_is_refused_with_the_reason() -> None:
    bare = from_tensors([TensorInfo("encoder.layer.0.attention.self.key.weight", (64, 64), "float32")])
    bare.kv_cache = kv_cache(bare, {"architectures": ["BertModel"]})
    with pytest.raises(UserError) as raised:
        require_matches(bare, Recipe.of([Rule.parse("*.kv_cache=fp8")]))
    assert "names KV caches: BertModel does not generate text" in str(raised.value)


def test_rule_for_a_shared_kv_cache_is_refused_and_names_the_owning_layer(tree: Tree) -> None:
    """In Gemma 3n, the last layers read the cache of an earlier one."""
    shares = from_tensors(tree.tensors.values())
    shares.kv_cache = kv_cache(shares, CONFIG | {"num_kv_shared_layers": 2})
    with pytest.raises(UserError) as raised:
        require_matches(shares, Recipe.of([Rule.parse("*.11.*.kv_cache=fp8")]))
    attention = "model.layers.{}.self_attn.kv_cache.k"
    assert str(raised.value) == (
        f"pattern '*.11.*.kv_cache' matches only KV caches that take no format (first {attention.format(11)}: the layer has no "
        f"cache of its own, it reads {attention.format(9)})"
    )


def _hybrid(tree: Tree) -> Tree:
    """The layers of `tree`, and one of Mamba."""
    mixer = {
        "conv1d.weight": (64, 1, 4), "A_log": (64, 8), "in_proj.weight": (128, 32), "out_proj.weight": (32, 64),
    }  # fmt: skip
    tensors = [TensorInfo(f"model.layers.12.mixer.{name}", shape, "bfloat16") for name, shape in mixer.items()]
    hybrid = from_tensors([*tree.tensors.values(), *tensors])
    hybrid.kv_cache = kv_cache(hybrid, CONFIG | {"num_hidden_layers": 13})
    return hybrid


STATES = [f"model.layers.12.mixer.kv_cache.{part}" for part in ("conv_state", "ssm_state")]


@pytest.mark.parametrize(
    ("rule", "formats"),
    [
        ("*.ssm_state=bf16", [None, "bfloat16"]),
        ("*.{conv,ssm}_state=f16", ["float16", "float16"]),
        ("*.kv_cache.{conv_state,ssm_state}=f32", ["float32", "float32"]),
        ("*.mixer.kv_cache=f16@stochastic", [None, "float16@stochastic"]),
        ("*.12.*.kv_cache.conv_state=bf16", ["bfloat16", None]),
        ("*.kv_cache=fp16", ["float16", "float16"]),
        ("*.kv_cache=fp8", [None, None]),
        ("*.mixer=bf16", [None, None]),
    ],
)
def test_rule_gives_recurrent_states_the_formats_that_they_may_have(
    tree: Tree, rule: str, formats: list[str | None]
) -> None:
    reached = _reached(_hybrid(tree), rule)
    assert [reached.get(name) for name in STATES] == formats


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("*.ssm_state=fp8", "recurrent states can't be fp8: they may be f32, bf16, f16, or, but for convolutions, f16@stochastic"),
        ("*.{conv_state,ssm_state}=int8", "recurrent states can't be i8"),
        ("*.kv_cache.ssm_state=int8@token", "recurrent states can't be int8@token"),
        ("*.mixer.kv_cache=fp8", "matches only 2 recurrent states: recurrent states can't be fp8"),
        ("*.conv_state=f16@stochastic", "matches only 1 recurrent state: convolutions can't be f16@stochastic: they may be f32"),
        ("*.self_attn.kv_cache=f16@stochastic", "matches only keys and values, which can't be float16@stochastic; only states of"),
        ("*.k=mxfp4", "pattern '*.k' matches only keys and values, which can't be mxfp4"),
        ("*.mlp=f16@stochastic", "only states of recurrences can be float16@stochastic: write a pattern that names them"),
    ],
)  # fmt: skip
def test_formats_that_a_recurrent_state_can_not_have_are_refused(tree: Tree, rule: str, words: str) -> None:
    with pytest.raises(UserError) as raised:
        require_matches(_hybrid(tree), Recipe.of([Rule.parse(rule)]))
    assert words in str(raised.value)


def test_rule_that_leaves_states_as_they_are_gives_a_notice(tree: Tree) -> None:
    def notices(tree: Tree, *rules: str) -> tuple[str, ...]:
        return state_notices(tree, make_plan(tree, Recipe.of(map(Rule.parse, rules))))

    (notice,) = notices(_hybrid(tree), "*.kv_cache=fp8", "*.kv_cache.{k,v}=fp8", "*.kv_cache=f16", "*.ssm_state=bf16")
    assert notice.startswith(
        "*.kv_cache=float8_e4m3fn leaves 2 recurrent states as they are: recurrent states can't be fp8"
    )
    assert notices(tree, "*.kv_cache=fp8") == ()


def test_formats_offered_for_a_pattern_are_those_that_its_caches_may_have() -> None:
    assert completions("*.ssm_state", "f") == ["f32", "f16", "f16@stochastic"]
    assert {"fp8", "fp8@head"} <= set(completions("*.kv_cache", "f"))
