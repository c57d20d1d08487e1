"""The mixes of llama-quantize, with types worked out by hand from its rules. For Llama, and Qwen3 with experts, llama-quantize gave
these types to the tensors of a file.
"""

from __future__ import annotations

import pytest

from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe import make_plan
from dtype_engine.recipe.presets import preset


def dense(
    layers: int = 16, width: int = 256, queries: int = 256, keys: int = 64, tied: bool = False, falcon: bool = False
) -> Tree:
    tensors = [TensorInfo("model.embed_tokens.weight", (512, width), "bfloat16")]
    classes = {"": "FalconForCausalLM" if falcon else "LlamaForCausalLM"}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        tensors += [
            TensorInfo(f"{at}.self_attn.q_proj.weight", (queries, width), "bfloat16"),
            TensorInfo(f"{at}.self_attn.k_proj.weight", (keys, width), "bfloat16"),
            TensorInfo(f"{at}.self_attn.v_proj.weight", (keys, width), "bfloat16"),
            TensorInfo(f"{at}.self_attn.o_proj.weight", (width, queries), "bfloat16"),
            TensorInfo(f"{at}.mlp.up_proj.weight", (512, width), "bfloat16"),
            TensorInfo(f"{at}.mlp.down_proj.weight", (width, 512), "bfloat16"),
            TensorInfo(f"{at}.input_layernorm.weight", (width,), "bfloat16"),
        ]
    if not tied:
        tensors.append(TensorInfo("lm_head.weight", (512, width), "bfloat16"))
    return Tree(tensors, classes)


def experts(count: int, layers: int = 8) -> Tree:
    tensors = [TensorInfo("model.embed_tokens.weight", (512, 256), "bfloat16")]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        tensors += [
            *(TensorInfo(f"{at}.self_attn.{part}_proj.weight", (256, 256), "bfloat16") for part in "qkvo"),
            TensorInfo(f"{at}.mlp.gate.weight", (count, 256), "bfloat16"),
            TensorInfo(f"{at}.mlp.experts.gate_up_proj", (count, 512, 256), "bfloat16"),
            TensorInfo(f"{at}.mlp.experts.down_proj", (count, 256, 256), "bfloat16"),
        ]
    return Tree(tensors, {"": "Qwen3MoeForCausalLM"})


def types(name: str, tree: Tree) -> dict[str, str]:
    return dict(make_plan(tree, preset(name).recipe(tree)).dtypes)


def layers_with(planned: dict[str, str], part: str, dtype: str) -> list[int]:
    return [int(name.split(".")[2]) for name, each in planned.items() if part in name and each == dtype]


MORE = [0, 1, 4, 7, 10, 13, 14, 15]


@pytest.mark.parametrize(("name", "base"), [("Q4_K_M", "q4_k"), ("Q5_K_M", "q5_k")])
def test_k_m_mixes_give_more_bits_to_values_and_down_projections_of_half_the_layers(name: str, base: str) -> None:
    planned = types(name, dense())
    for part in ("v_proj", "down_proj"):
        assert layers_with(planned, part, "q6_k") == MORE
        assert layers_with(planned, part, base) == sorted(set(range(16)) - set(MORE))
    for part in ("q_proj", "k_proj", "o_proj", "up_proj"):
        assert layers_with(planned, part, base) == list(range(16))
    assert layers_with(planned, "norm", "float32") == list(range(16))
    assert (planned["model.embed_tokens.weight"], planned["lm_head.weight"]) == (base, "q6_k")


def test_q3_k_m() -> None:
    planned = types("Q3_K_M:imatrix", dense())
    assert layers_with(planned, "v_proj", "q5_k:imatrix") == [0, 1]
    assert layers_with(planned, "v_proj", "q4_k:imatrix") == list(range(2, 16))
    assert layers_with(planned, "down_proj", "q5_k:imatrix") == [0]
    assert layers_with(planned, "down_proj", "q4_k:imatrix") == list(range(1, 16))
    assert layers_with(planned, "o_proj", "q4_k:imatrix") == list(range(16))
    assert layers_with(planned, "k_proj", "q3_k:imatrix") == list(range(16))
    assert planned["lm_head.weight"] == "q6_k:imatrix"


def test_iq4_xs_depends_on_the_imatrix_and_on_how_many_heads_share_a_key() -> None:
    without, given = types("IQ4_XS", dense()), types("IQ4_XS:imatrix", dense())
    assert layers_with(without, "down_proj", "q5_k") == [0, 1]
    assert layers_with(without, "v_proj", "q5_k") == list(range(16))
    assert layers_with(given, "down_proj", "iq4_xs:imatrix") == list(range(16))
    assert layers_with(given, "v_proj", "q5_k:imatrix") == list(range(16))
    assert layers_with(types("IQ4_XS", dense(keys=128)), "v_proj", "iq4_xs") == list(range(16))


def test_tied_embedding_has_the_type_of_the_output() -> None:
    assert types("Q4_K_M", dense(tied=True))["model.embed_tokens.weight"] == "q6_k"


def test_rows_of_other_lengths_fall_back_and_the_output_is_in_8_bits() -> None:
    planned = types("Q4_K_M", dense(layers=4, width=320, queries=256))
    assert layers_with(planned, "q_proj", "q5_0") == list(range(4))
    assert layers_with(planned, "v_proj", "q8_0") == [2, 3]
    assert layers_with(planned, "v_proj", "q5_0") == [0, 1]
    assert layers_with(planned, "o_proj", "q4_k") == list(range(4))
    assert (planned["model.embed_tokens.weight"], planned["lm_head.weight"]) == ("q5_0", "q8_0")


def test_model_of_80_layers_and_shared_keys_has_at_least_5_bits_for_values() -> None:
    planned = types("Q4_K_M", dense(layers=80))
    assert layers_with(planned, "v_proj", "q4_k") == []
    assert layers_with(planned, "v_proj", "q6_k")[:11] == [*range(10), 12]
    assert layers_with(planned, "v_proj", "q5_k")[:2] == [10, 11]


def test_falcon_has_rules_of_its_own() -> None:
    planned = types("Q4_K_M", dense(layers=32, falcon=True))
    assert planned["lm_head.weight"] == "q8_0"
    assert layers_with(planned, "down_proj", "q6_k") == [0, 1]
    assert layers_with(planned, "down_proj", "q5_k")[:3] == [2, 3, 6]
    assert layers_with(types("Q3_K_M", dense(layers=32, falcon=True)), "o_proj", "q3_k") == list(range(32))


@pytest.mark.parametrize(
    ("name", "base", "attention"), [("Q4_K_M", "q4_k", "q5_k"), ("Q5_K_M", "q5_k", "q5_k"), ("Q3_K_M", "q3_k", "q5_k")]
)
def test_eight_experts_have_wide_keys_and_values(name: str, base: str, attention: str) -> None:
    planned = types(name, experts(8))
    for part in ("k_proj", "v_proj"):
        assert layers_with(planned, part, "q8_0") == list(range(8))
    assert layers_with(planned, "o_proj", attention) == list(range(8))
    assert layers_with(planned, "q_proj", base) == list(range(8))
    assert layers_with(planned, "gate_up_proj", base) == list(range(8))
    assert layers_with(planned, "mlp.gate.weight", "float32") == list(range(8))
    assert layers_with(types(name, experts(4)), "k_proj", base) == list(range(8))


def test_mix_without_names_of_gguf_has_one_type() -> None:
    tree = Tree([TensorInfo("encoder.a.weight", (8, 512), "float32"), TensorInfo("b", (8,), "float32")], {"": "Net"})
    assert types("Q4_K_M", tree) == {"encoder.a.weight": "q4_k", "b": "float32"}
