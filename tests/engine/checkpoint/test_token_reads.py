"""Active bytes: against sums made by hand, against the bytes that a decoding step of plain transformers reads, and by headers."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers import architectures
from tests.helpers.decoded_bytes import decoded_bytes
from tests.helpers.mixtures import MIXTURES, make_mixture

from dtype_engine import Recipe, Rule
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.token_reads import token_reads
from dtype_engine.core.tree import TensorInfo, Tree, from_tensors
from dtype_engine.recipe import make_plan
from dtype_engine.runtime.model.module_tree import tree_of

H, V = 32, 64
"""The width of the models, and the number of rows of their tables."""
EMBEDDING_NORM_AND_HEAD = H + H + V * H
GROUPED = 2 * H * H + 2 * H * 16
"""The queries, keys, values and output of an attention with two heads of 16 values, and one head of keys."""
LATENT = H * 16 + 16 + 16 * 32 + H * (16 + 8) + 16 + 16 * 2 * (8 + 16) + 2 * 16 * H
NORMS = 2 * H


def gated(width: int) -> int:
    return 3 * H * width


BY_HAND = {
    # A layer has its attention, its norms, a router, and the experts that a token is sent to.
    "Mixtral": 2 * (GROUPED + NORMS + 4 * H + 2 * gated(48)) + EMBEDDING_NORM_AND_HEAD,
    # Queries and keys have norms.
    "OLMoE": 2 * (GROUPED + NORMS + (H + 16) + 8 * H + 3 * gated(48)) + EMBEDDING_NORM_AND_HEAD,
    # Queries, keys and values have biases, and a shared expert has a gate.
    "Qwen2-MoE": 2 * (GROUPED + (H + 16 + 16) + NORMS + 6 * H + 2 * gated(24) + gated(40) + H)
    + EMBEDDING_NORM_AND_HEAD,
    # The first layer is dense; in the second, the router has a bias for each expert.
    "DeepSeek-V3": 2 * (LATENT + NORMS) + gated(48) + (8 * H + 8 + 2 * gated(24) + gated(24)) + EMBEDDING_NORM_AND_HEAD,
    # All projections, routers and experts have biases, and an attention has a sink for each head.
    "gpt-oss": (
        2 * (GROUPED + (H + 16 + 16 + H) + 2 + NORMS + 4 * H + 4 + 2 * (gated(48) + 2 * 48 + H))
        + EMBEDDING_NORM_AND_HEAD
    ),
    # The embedding table is the output head.
    "Granite-MoE": 2 * (GROUPED + NORMS + 5 * H + 2 * gated(48)) + H + V * H,
    "Llama 4": 2 * (GROUPED + NORMS + 4 * H + gated(48) + gated(48)) + EMBEDDING_NORM_AND_HEAD,
    # Queries and outputs of the attention are experts, too, with a router and a bias of their own.
    "JetMoE": (
        2 * (2 * H * 32 + NORMS + (4 * H + H + 2 * 2 * H * 32) + (4 * H + H + 2 * gated(48)))
        + EMBEDDING_NORM_AND_HEAD
        - H
    ),
}
"""Values that a token reads, by model."""


@pytest.mark.parametrize("name", BY_HAND)
def test_active_bytes_of_a_mixture_are_those_counted_by_hand(name: str, tmp_path: Path) -> None:
    model = make_mixture(name)
    model.save_pretrained(tmp_path)
    assert tree_of(model).active_bytes() == 4 * BY_HAND[name]
    assert open_checkpoint(tmp_path).tree().active_bytes() == 4 * BY_HAND[name]


@pytest.mark.parametrize("name", [name for name in MIXTURES if name not in ("Llama 4", "JetMoE")])
def test_active_bytes_of_a_mixture_are_those_that_a_decoding_step_reads(name: str, tmp_path: Path) -> None:
    model = make_mixture(name)
    model.save_pretrained(tmp_path)
    read = decoded_bytes(model, {"input_ids": architectures.tokens()})
    assert open_checkpoint(tmp_path).tree().active_bytes() == read
    assert tree_of(model).active_bytes() == read < tree_of(model).stored_bytes


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gpt2",
        "gemma3",
        "qwen3",
        "phi3",
        "falcon",
        "gpt_neox",
        "bart",
        "whisper",
        "llava",
        "mamba2",
        "qwen3_next",
    ],
)
def test_active_bytes_are_those_that_a_decoding_step_reads(name: str, tmp_path: Path) -> None:
    model, inputs = architectures.make(name)
    model.save_pretrained(tmp_path)
    read = decoded_bytes(model, inputs)
    assert open_checkpoint(tmp_path).tree().active_bytes() == read
    assert tree_of(model).active_bytes() == read


@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek-V3"])
def test_active_bytes_of_experts_in_several_dtypes_are_the_mean_over_all_choices_of_a_router(
    name: str, tmp_path: Path
) -> None:
    model = make_mixture(name)
    model.save_pretrained(tmp_path)
    tree = open_checkpoint(tmp_path).tree()
    widths = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}
    weights = [tensor for tensor in tree.tensors.values() if ".experts." in tensor.name]
    planned = {tensor.name: tensor.dtype for tensor in tree.tensors.values()}
    # An expert's matrices are in one dtype; a scale of four bytes for each row is counted with fp8.
    sizes: dict[str, dict[str, int]] = {}
    for tensor in weights:
        layer, _, rest = tensor.name.partition(".experts.")
        expert = rest.split(".")[0]
        planned[tensor.name] = list(widths)[int(expert) % 3]
        nbytes = tensor.numel * widths[planned[tensor.name]]
        nbytes += 4 * tensor.shape[0] if planned[tensor.name] == "float8_e4m3fn" else 0
        sizes.setdefault(layer, {})[expert] = sizes.get(layer, {}).get(expert, 0) + nbytes
    of_experts = sum(
        statistics.mean(map(sum, itertools.combinations(of_layer.values(), 2))) for of_layer in sizes.values()
    )
    wide = sum(2 * 4 * tensor.numel / len(next(iter(sizes.values()))) for tensor in weights)
    assert tree.active_bytes(planned) == round(4 * BY_HAND[name] - wide + of_experts)


def test_active_bytes_follow_the_recipe() -> None:
    tree = tree_of(make_mixture("Mixtral"))
    plan = make_plan(tree, Recipe.of([Rule("*", "bfloat16")]))
    assert tree.active_bytes(plan.dtypes) == 2 * BY_HAND["Mixtral"]


def with_config(tensors: list[TensorInfo], **config: object) -> Tree:
    tree = from_tensors(tensors)
    tree.token_reads = token_reads(tree, config or None)
    return tree


def test_active_bytes_are_unknown_without_a_configuration_and_for_models_that_generate_no_text() -> None:
    tensors = [TensorInfo("a.weight", (4, 4), "float32")]
    assert with_config(tensors).active_bytes() is None
    assert from_tensors(tensors).active_bytes() is None
    encoder = with_config(tensors, architectures=["BertModel"])
    assert encoder.active_bytes() is None
    assert encoder.token_reads.none_because == "BertModel does not generate text"


EXPERTS = [TensorInfo(f"model.layers.0.mlp.experts.{index}.up_proj.weight", (6, 10), "int8") for index in range(4)]


@pytest.mark.parametrize(
    ("config", "share", "notes"),
    [
        ({"num_experts_per_tok": 3}, 3 / 4, 0),
        ({"moe_topk": [1, 2]}, 1 / 4, 0),
        ({"num_experts_per_tok": 9}, 1, 0),
        ({"num_experts_per_tok": "2"}, 1, 1),
        ({"num_experts_per_tok": -1}, 1, 1),
        ({"moe_topk": []}, 1, 1),
        ({}, 1, 1),
        ({"model_type": "switch_transformers"}, 1 / 4, 0),
        # LongCat's router also chooses among experts that compute nothing.
        ({"moe_topk": 3, "n_routed_experts": 4, "zero_expert_num": 2}, 1 / 2, 0),
        ({"text_config": {"num_experts_per_tok": 2}}, 2 / 4, 0),
    ],
)
def test_share_of_experts_is_read_from_the_configuration(config: dict[str, object], share: float, notes: int) -> None:
    tree = with_config(EXPERTS, architectures=["AForCausalLM"], **config)
    assert tree.active_bytes() == 4 * 60 * share
    assert len(tree.token_reads.notes) == notes


def test_draft_head_and_encoder_of_pictures_are_not_read_for_a_token() -> None:
    names = (
        "model.visual.blocks.0.attn.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "mtp.fc.weight",
        "lm_head.weight",
    )
    tree = from_tensors([TensorInfo(name, (8, 4), "int8") for name in names])
    tree.draft = type(tree.draft)("named", ("mtp",))
    tree.token_reads = token_reads(tree, {"architectures": ["AForConditionalGeneration"]})
    assert tree.active_bytes() == 2 * 32
    assert "model.visual and 1 module more" in tree.token_reads.notes[0]


def test_headers_give_the_active_bytes_without_torch(tmp_path: Path) -> None:
    make_mixture("Qwen3-MoE").save_pretrained(tmp_path)
    code = (
        "import sys; from pathlib import Path; from dtype_engine.checkpoint import open_checkpoint\n"
        f"print(open_checkpoint(Path({str(tmp_path)!r})).tree().active_bytes())\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) == tree_of(make_mixture("Qwen3-MoE")).active_bytes()
