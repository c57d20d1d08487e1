"""Which weights runtimes fuse, and how a plan treats fused weights."""

from __future__ import annotations

from dtype_engine.core.fused import fused_groups, scale_groups, siblings, split_groups, whole_scale_group
from dtype_engine.recipe.fused_words import fused_with, fused_words

ATTENTION = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
MLP = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
EXPERT = [f"layers.0.experts.3.w{number}.weight" for number in (1, 2, 3)]


def plan(**special: str) -> dict[str, str]:
    planned = dict.fromkeys([*ATTENTION, *MLP, *EXPERT, "norm.weight", "q_proj.bias"], "bfloat16")
    return planned | {name: dtype for name in planned for part, dtype in special.items() if f".{part}" in name}


def words_of(dtype: str, taken: list[str], planned: dict[str, str]) -> str:
    return fused_words(dtype, set(taken), planned, fused_groups(planned))


def test_fused_groups_contain_only_existing_weights() -> None:
    assert fused_groups(plan()) == (tuple(ATTENTION), tuple(MLP[:2]), (EXPERT[0], EXPERT[2]))
    assert fused_groups(ATTENTION[:1]) == ()
    assert siblings("q_proj.weight") == ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    assert siblings("q_proj.bias") == siblings("model.norm.weight") == ()


def test_fused_nvfp4_weights_share_a_scale() -> None:
    assert scale_groups(plan(q_proj="nvfp4")) == {}
    assert scale_groups(plan(q_proj="nvfp4", k_proj="nvfp4")) == dict.fromkeys(ATTENTION[:2], tuple(ATTENTION[:2]))
    assert scale_groups(plan(w1="nvfp4", w2="nvfp4", w3="nvfp4")) == dict.fromkeys(
        (EXPERT[0], EXPERT[2]), (EXPERT[0], EXPERT[2])
    )
    assert scale_groups(plan(q_proj="mxfp4", k_proj="mxfp4", v_proj="mxfp4")) == {}
    mixed = plan(q_proj="nvfp4", k_proj="nvfp4:gptq", v_proj="nvfp4:imatrix")
    assert scale_groups(mixed) == dict.fromkeys(ATTENTION, tuple(ATTENTION))


def test_fused_weights_in_different_formats_are_reported_as_split() -> None:
    assert split_groups(plan(q_proj="nvfp4", down_proj="int8")) == (tuple(ATTENTION),)
    assert split_groups(plan(q_proj="float16")) == (), "runtimes cast those that have no scales"
    assert split_groups(plan(gate_proj="int4@g128", up_proj="int4@g32")) == (tuple(MLP[:2]),)
    assert split_groups(plan(gate_proj="int4@g32:gptq", up_proj="int4@g32")) == (), "they have one format"


def test_preview_of_a_cast_says_how_it_affects_fused_weights() -> None:
    assert words_of("nvfp4", ATTENTION[:1], plan()) == "k_proj, v_proj differ: vLLM refuses"
    assert words_of("nvfp4", ATTENTION, plan()) == ""
    assert words_of("nvfp4", ATTENTION[:1], plan(k_proj="nvfp4", v_proj="nvfp4")) == "k_proj, v_proj: new scale"
    assert words_of("bfloat16", ATTENTION[:1], plan(self_attn="nvfp4")) == (
        "k_proj, v_proj: new scale, k_proj, v_proj differ: vLLM refuses"
    )
    twice = {f"{model}.{name}": dtype for model in "ab" for name, dtype in plan().items()}
    assert words_of("nvfp4", [f"a.{ATTENTION[0]}", f"b.{ATTENTION[0]}", f"b.{MLP[1]}"], twice) == (
        "k_proj, v_proj, gate_proj differ: vLLM refuses"
    )
    assert words_of("float16", ATTENTION[:1], plan()) == "", "runtimes cast those that have no scales"
    assert words_of("stored", ATTENTION[:1], plan()) == ""
    planned = plan(self_attn="nvfp4", gate_proj="int8")
    assert fused_with(ATTENTION[0], planned) == "with k_proj, v_proj in vLLM and SGLang: they share one tensor scale"
    assert (
        fused_with(MLP[0], planned) == "with up_proj in vLLM and SGLang, which refuse different formats: up_proj bf16"
    )
    assert fused_with(EXPERT[0], planned) == "with w3 in vLLM and SGLang"
    assert fused_with(EXPERT[1], planned) == ""


def test_roundings_do_not_part_fused_weights() -> None:
    mixed = plan(
        q_proj="nvfp4", k_proj="nvfp4:gptq", v_proj="nvfp4:imatrix", gate_proj="int4@g32", up_proj="int4@g32:gptq"
    )
    assert split_groups(mixed) == ()
    assert scale_groups(mixed) == dict.fromkeys(ATTENTION, tuple(ATTENTION))
    assert whole_scale_group(ATTENTION[0], "nvfp4:gptq", mixed) == tuple(ATTENTION)
    assert split_groups(plan(q_proj="nvfp4:gptq", k_proj="mxfp4:gptq")) == (tuple(ATTENTION),)
    assert words_of("nvfp4:gptq", ATTENTION[:1], plan(self_attn="nvfp4")) == ""
    assert (
        words_of("nvfp4:gptq", ATTENTION[:1], plan(k_proj="nvfp4", v_proj="nvfp4:imatrix"))
        == "k_proj, v_proj: new scale"
    )
    assert (
        words_of("nvfp4:gptq", ATTENTION[:1], plan(k_proj="nvfp4")) == "k_proj: new scale, v_proj differ: vLLM refuses"
    )
    assert fused_with(ATTENTION[0], mixed) == "with k_proj, v_proj in vLLM and SGLang: they share one tensor scale"
    assert fused_with(ATTENTION[0], mixed | {ATTENTION[1]: "bfloat16"}).endswith("different formats: k_proj bf16")
