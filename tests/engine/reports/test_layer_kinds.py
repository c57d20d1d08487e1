"""Kinds of layers by the names that real checkpoints have, and their totals."""

from __future__ import annotations

from dtype_engine.core.text import Name
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.reports.layer_kinds import KINDS, kind_of_tensor, kinds_of_modules, totals_by_kind

NAMES = {
    "embeddings": [
        "model.embed_tokens.weight", "bert.embeddings.word_embeddings.weight", "transformer.wte.weight", "shared.weight",
        "vit.embeddings.patch_embeddings.projection.weight", "token_embd.weight", "model.decoder.embed_positions.weight",
        "pos_embed", "gpt_neox.embed_in.weight",
    ],
    "attention": [
        "model.layers.0.self_attn.q_proj.weight", "bert.encoder.layer.0.attention.output.dense.weight",
        "h.0.attn.c_attn.weight", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "blk.0.attn_q.weight", "model.layers.0.linear_attn.conv1d.weight", "model.decoder.layers.0.encoder_attn.k_proj.bias",
    ],
    "state space": ["backbone.layers.0.mixer.in_proj.weight", "model.layers.1.mamba.A_log"],
    "MLP": [
        "model.layers.0.mlp.up_proj.weight", "bert.encoder.layer.0.intermediate.dense.weight",
        "bert.encoder.layer.0.output.dense.weight", "h.0.mlp.c_fc.weight", "model.encoder.layers.0.fc1.weight",
        "encoder.block.0.layer.1.DenseReluDense.wo.weight", "blk.0.ffn_gate.weight", "layers.0.feed_forward.w1.weight",
    ],
    "experts": [
        "model.layers.3.mlp.experts.7.down_proj.weight", "model.layers.3.mlp.gate.weight", "model.layers.3.mlp.router.weight",
        "model.layers.3.mlp.shared_experts.up_proj.weight", "model.layers.3.block_sparse_moe.experts.0.w1.weight",
        "blk.3.ffn_gate_exps.weight", "blk.3.ffn_gate_inp.weight", "model.layers.3.mlp.shared_expert_gate.weight",
    ],
    "norms": [
        "model.norm.weight", "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_norm.weight",
        "bert.encoder.layer.0.attention.output.LayerNorm.weight", "transformer.ln_f.weight", "h.0.ln_1.bias",
        "blk.0.attn_norm.weight", "output_norm.weight", "backbone.norm_f.weight", "layer1.0.bn1.running_mean",
        "model.layers.0.self_attn.kv_a_layernorm.weight", "vit.encoder.layer.0.layernorm_before.weight",
    ],
    "head": ["lm_head.weight", "output.weight", "classifier.dense.weight", "score.weight", "embed_out.weight"],
    "other": ["conv1.weight", "bert.pooler.dense.weight", "visual_projection.weight"],
}  # fmt: skip


def _tree() -> Tree:
    return Tree([TensorInfo(Name(name), (2, 3), "bfloat16") for names in NAMES.values() for name in names])


def test_layer_kind_is_found_by_names_of_real_checkpoints() -> None:
    kinds = kinds_of_modules(_tree())
    found = {kind: [kind_of_tensor(name, kinds) for name in names] for kind, names in NAMES.items()}
    assert found == {kind: [kind] * len(names) for kind, names in NAMES.items()}


def test_each_tensor_counts_once_in_the_totals_of_layer_kinds() -> None:
    tree = _tree()
    planned = dict.fromkeys(NAMES["norms"], "float32")
    found = totals_by_kind(tree, planned)
    assert list(found) == list(KINDS)
    assert {kind: totals.parameters for kind, totals in found.items()} == {
        kind: 6 * len(names) for kind, names in NAMES.items()
    }
    assert found["norms"].nbytes == {"float32": 6 * 4 * len(NAMES["norms"])}
    assert sum(totals.total_bytes for totals in found.values()) == tree.totals(planned)[""].total_bytes


def test_tied_output_head_counts_only_as_embedding() -> None:
    weight = TensorInfo(Name("model.embed_tokens.weight"), (4, 2), "float32", aliases=(Name("lm_head.weight"),))
    found = totals_by_kind(Tree([weight], {"": "LlamaForCausalLM", "lm_head": "Linear"}), {})
    assert {kind: totals.parameters for kind, totals in found.items()} == {"embeddings": 8}


def test_layer_kind_is_found_by_class_if_the_name_does_not_say_it() -> None:
    classes = {"": "MambaNet", "a": "MyAttention", "b": "BatchNorm2d", "c": "Embedding", "d": "FeedForward"}
    kinds = kinds_of_modules(Tree([], classes))
    assert kinds == {"": "other", "a": "attention", "b": "norms", "c": "embeddings", "d": "MLP"}
