from __future__ import annotations

import gguf
import pytest

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.llama_types import LLAMA_DTYPES, LLAMA_TYPES, LlamaType, fitted
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe import Recipe, Rule, llama_notices, make_plan


@pytest.mark.parametrize("row", LLAMA_TYPES.values(), ids=lambda row: row.name)
def test_blocks_and_numbers_are_those_of_the_gguf_package(row: LlamaType) -> None:
    kind = gguf.GGMLQuantizationType[row.name.upper()]
    assert row.kind == kind
    assert (row.block, row.nbytes) == gguf.GGML_QUANT_SIZES[kind]
    assert dtypes.nbytes_in((3, 2 * row.block), row_name(row)) == 3 * 2 * row.nbytes


def row_name(row: LlamaType) -> str:
    return row.name if row.name in LLAMA_DTYPES else f"{row.name}:imatrix"


def test_fallbacks_have_smaller_blocks_of_at_least_as_many_bits() -> None:
    for row in LLAMA_TYPES.values():
        assert bool(row.fallback) is (row.block == 256)
        if row.fallback:
            other = LLAMA_TYPES[row.fallback]
            assert other.block == 32
            assert other.bits_per_weight > row.bits_per_weight


@pytest.mark.parametrize(
    ("dtype", "shape", "given"),
    [
        ("q4_k", (64, 512), "q4_k"),
        ("q4_k", (64, 576), "q5_0"),
        ("q4_k:imatrix", (64, 576), "q5_0:imatrix"),
        ("q6_k:imatrix", (64, 576), "q8_0"),
        ("q3_k", (64, 576), "q4_0"),
        ("iq3_s", (64, 576), "iq4_nl"),
        ("tq2_0", (64, 576), "q4_0"),
        ("q4_k", (64, 100), "float16"),
        ("q8_0", (64, 100), "float16"),
        ("q4_k", (512,), "float32"),
        ("q4_k", (1, 512), "float32"),
        ("q4_k", (8, 64, 512), "q4_k"),
        ("q4_k", (64, 64, 4), "float16"),
        ("int4@g128", (64, 100), "int4@g128"),
    ],
)
def test_row_that_blocks_do_not_divide_falls_back_as_in_llama_quantize(
    dtype: str, shape: tuple[int, ...], given: str
) -> None:
    assert fitted(dtype, shape) == given
    assert dtypes.nbytes_in(shape, dtype) == dtypes.nbytes_in(shape, given)


def test_routers_norms_and_positions_keep_float32() -> None:
    for name in (
        "model.layers.0.mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.router.weight", "transformer.wpe.weight",
        "bert.embeddings.position_embeddings.weight", "q_norm.weight", "mixer.conv1d.weight",
    ):  # fmt: skip
        assert fitted("q8_0", (8, 256), name) == "float32"
    for name in ("mlp.gate_proj.weight", "model.embed_tokens.weight", "lm_head.weight", "mlp.experts.gate_up_proj"):
        assert fitted("q8_0", (8, 256), name) == "q8_0"


def test_type_that_needs_an_imatrix_has_no_other_name() -> None:
    assert dtypes.parse_target("IQ2_XXS:imatrix") == "iq2_xxs:imatrix"
    with pytest.raises(UserError, match="did you mean iq2_xxs:imatrix"):
        dtypes.parse_target("iq2_xxs")
    assert dtypes.unrounded("q4_k:imatrix") == "q4_k"


def test_every_type_rounds_activations_to_8_bits() -> None:
    """`vec_dot_type` in ggml-cpu.c: q8_K for blocks of 256, q8_1 for the types of 32 that have a minimum, else q8_0."""
    for name, row in LLAMA_TYPES.items():
        assert dtypes.quantizes_activations(row_name(row))
        assert row.inputs == ("q8_k" if row.block == 256 else "q8_1" if name in ("q4_1", "q5_1") else "q8_0")
    assert not dtypes.quantizes_activations("float16")


def test_plan_gives_each_tensor_what_it_can_have_and_says_so() -> None:
    tree = Tree(
        TensorInfo(name, shape, "bfloat16")
        for name, shape in (
            ("a.weight", (64, 512)), ("b.weight", (64, 576)), ("c.weight", (64, 576)), ("norm.weight", (512,)),
        )
    )  # fmt: skip
    plan = make_plan(tree, Recipe.of([Rule.parse("*=q4_k"), Rule.parse("c=bf16")]))
    assert plan.dtypes == {
        "a.weight": "q4_k", "b.weight": "q5_0", "c.weight": "bfloat16", "norm.weight": "float32",
    }  # fmt: skip
    assert plan.planned_bytes == 64 * 2 * 144 + 64 * 18 * 22 + 64 * 576 * 2 + 512 * 4
    effect = next(plan.effects(tree))
    assert effect.bytes_after == 64 * 2 * 144 + 2 * 64 * 18 * 22 + 512 * 4
    assert llama_notices(tree, plan) == (
        "1 tensor in q5_0, not q4_k: q4_k needs rows of a multiple of 256 values (first b.weight with 576)",
        "1 tensor in float32, not q4_k: llama-quantize keeps vectors, norms and routers in float32 (first norm.weight)",
    )
    assert llama_notices(tree, make_plan(tree, Recipe.of([Rule.parse("a=q4_k")]))) == ()


def test_weights_with_inputs_first_are_named() -> None:
    tree = Tree([TensorInfo("h.0.c_fc.weight", (64, 256), "float32")], {"": "GPT2Model", "h.0.c_fc": "Conv1D"})
    (notice,) = llama_notices(tree, make_plan(tree, Recipe.of([Rule.parse("*=q4_k")])))
    assert notice == (
        "blocks lie along the outputs of 1 weight of Conv1D, which has inputs first; in a GGUF file they lie along the inputs, "
        "so values differ (first h.0.c_fc.weight)"
    )
    assert llama_notices(tree, make_plan(tree, Recipe.of([Rule.parse("*=bf16")]))) == ()
