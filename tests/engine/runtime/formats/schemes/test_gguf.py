"""GGUF files as transformers models: configuration and weights equal those that transformers itself reads from the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tests.helpers.gguf_files import gguf_file, write_model

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.runtime.weights.coded import CodedSource
from dtype_engine.runtime.weights.files import read_mapped

_SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
          "tie_word_embeddings": False}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _write(path: Path, arch: str, model: Any, kind: str) -> None:
    def add_more(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(model.config.head_dim)
        writer.add_rope_freq_base(10000.0)
        if hasattr(model.config, "num_experts"):
            writer.add_expert_count(model.config.num_experts)
            writer.add_expert_used_count(model.config.num_experts_per_tok)
            writer.add_expert_feed_forward_length(model.config.moe_intermediate_size)

    write_model(path, arch, model, add_more, kind=kind)


@pytest.mark.parametrize(
    ("arch", "config", "kind"),
    [
        ("llama", transformers.LlamaConfig(**_SIZES), "Q8_0"),
        ("llama", transformers.LlamaConfig(**_SIZES), "F16"),
        ("qwen2", transformers.Qwen2Config(**_SIZES), "Q4_0"),
        ("qwen3", transformers.Qwen3Config(**_SIZES), "BF16"),
        ("qwen3moe", transformers.Qwen3MoeConfig(**_SIZES, **_EXPERTS), "Q5_1"),
        ("gemma2", transformers.Gemma2Config(**{**_SIZES, "tie_word_embeddings": True}), "Q8_0"),
    ],
)
def test_gguf_weights_equal_those_that_transformers_reads(tmp_path: Path, arch: str, config: Any, kind: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    path = tmp_path / "model.gguf"
    _write(path, arch, model, kind)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config is not None
    ours = {name: CodedSource(weight).read() for name, weight in checkpoint.coded.items()}
    ours |= {name: read_mapped(checkpoint.tensors[own]) for own, name in checkpoint.renamed.items()}
    theirs = _read_by_transformers(path, model)
    for name, right in theirs.items():
        assert torch.equal(_picked(ours, name), right), name
    made = type(config)(**checkpoint.config)
    for entry in (*_SIZES, *(_EXPERTS if "moe" in arch else ())):
        assert getattr(made, entry) == getattr(config, entry), entry
    assert checkpoint.config["architectures"] == [type(model).__name__]


def _read_by_transformers(path: Path, model: Any) -> dict[str, torch.Tensor]:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    found = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    return {name: torch.as_tensor(tensor) for name, tensor in found.items()}


def _picked(ours: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a tensor of transformers' module, whose experts are stacked, from our weights, whose experts are apart."""
    if name in ours:
        return ours[name]
    stem, _, kind = name.rpartition(".")
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    experts = [torch.cat([ours[f"{stem}.{expert}.{each}.weight"] for each in kinds]) for expert in range(4)]
    return torch.stack(experts)


def test_some_rows_of_a_gguf_weight_equal_those_of_the_whole_weight(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**_SIZES))
    path = tmp_path / "model.gguf"
    _write(path, "llama", model, "Q8_0")
    weight = open_checkpoint(path).coded["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(CodedSource(weight).rows(5, 23), CodedSource(weight).read()[5:23])


def test_tensors_of_an_unknown_gguf_architecture_keep_their_names(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with gguf_file(path, "rwkv7") as writer:
        writer.add_tensor("blk.0.time_mix_key.weight", np.zeros((32, 32), np.float32))
    checkpoint = open_checkpoint(path)
    assert checkpoint.config is None
    assert not checkpoint.coded
    assert list(checkpoint.weights) == ["blk.0.time_mix_key.weight"]


@pytest.mark.parametrize("architecture", ["llama", "unknown"])
def test_gguf_vector_is_decoded_as_one_row(architecture: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    with gguf_file(tmp_path / "x.gguf", architecture) as writer:
        writer.add_tensor("output_norm.weight", blocks[0], raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    (weight,) = open_checkpoint(tmp_path / "x.gguf").coded.values()
    right = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)[0]
    assert weight.shape == (64,)
    np.testing.assert_array_equal(CodedSource(weight).read().numpy(), right)
    np.testing.assert_array_equal(CodedSource(weight).rows(3, 40).numpy(), right[3:40])


@pytest.mark.skipif(not hasattr(gguf.GGMLQuantizationType, "Q1_0"), reason="the gguf package does not know Q1_0")
def test_values_of_one_bit_are_the_scale_with_their_sign(tmp_path: Path) -> None:
    random, kind = np.random.default_rng(1), gguf.GGMLQuantizationType.Q1_0
    scale, bits = random.normal(size=(5, 3)).astype(np.float16), random.integers(0, 2, (5, 3, 128), dtype=np.uint8)
    packed = np.packbits(bits, axis=2, bitorder="little")
    with gguf_file(tmp_path / "x.gguf", "llama") as writer:
        blocks = np.concatenate([scale[..., None].view(np.uint8), packed], 2).reshape(5, -1)
        writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=kind)
    (weight,) = open_checkpoint(tmp_path / "x.gguf").coded.values()
    right = np.where(bits, scale[..., None], -scale[..., None]).astype(np.float32).reshape(5, -1)
    assert (weight.format, weight.nbytes) == ("gguf:q1_0", 5 * 3 * 18)
    np.testing.assert_array_equal(CodedSource(weight).read().numpy(), right)
    np.testing.assert_array_equal(CodedSource(weight).rows(1, 4).numpy(), right[1:4])


@pytest.mark.parametrize("heads", [[2, 2], False, 3])
def test_gguf_with_head_counts_that_contradict_its_weights_has_no_config(
    heads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = {list: "add_array", bool: "add_bool", int: "add_uint32"}[type(heads)]
    field = "llama.attention.head_count_kv"
    monkeypatch.setattr(gguf.GGUFWriter, "add_head_count_kv", lambda self, count: getattr(self, add)(field, heads))
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**_SIZES | {"num_key_value_heads": 4})
    )
    _write(tmp_path / "model.gguf", "llama", model, "Q8_0")
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert checkpoint.config is None
    assert "blk.0.attn_k.weight" in checkpoint.coded
