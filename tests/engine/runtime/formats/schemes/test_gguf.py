"""GGUF files as transformers models: configuration and weights equal those that transformers itself reads from the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.runtime.weights.coded import CodedSource
from dtype_engine.runtime.weights.files import read_mapped

_SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
          "tie_word_embeddings": False}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _swapped(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows as llama.cpp's converter does: the two halves of each head alternate."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def _write(path: Path, arch: str, model: Any, quantization: gguf.GGMLQuantizationType) -> None:
    """Write a model as llama.cpp's converter does, with its names from the gguf package's table."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        stem, dot, kind = name.rpartition(".")
        if name.endswith("gate_up_proj"):  # experts of one layer: the file has gate and up apart
            block = name.split(".")[2]
            gate, up = np.split(values, 2, axis=1)
            _add(writer, f"blk.{block}.ffn_gate_exps.weight", gate, quantization)
            _add(writer, f"blk.{block}.ffn_up_exps.weight", up, quantization)
            continue
        if name.endswith("experts.down_proj"):
            _add(writer, f"blk.{name.split('.')[2]}.ffn_down_exps.weight", values, quantization)
            continue
        own = names.get_name(stem)
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
            values = _swapped(values, heads)
        if arch.startswith("gemma") and "norm" in stem:
            values = values + 1
        _add(writer, f"{own}{dot}{kind}", values, quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    values = np.ascontiguousarray(values, np.float32)
    if values.ndim < 2 or "ffn_gate_inp" in name:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


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
    _write(path, arch, model, gguf.GGMLQuantizationType[kind])
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


def test_rows_decoded_alone_equal_those_of_the_whole(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**_SIZES))
    path = tmp_path / "model.gguf"
    _write(path, "llama", model, gguf.GGMLQuantizationType.Q8_0)
    weight = open_checkpoint(path).coded["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(CodedSource(weight).rows(5, 23), CodedSource(weight).read()[5:23])


def test_unknown_gguf_architecture_keeps_its_names(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "rwkv7")
    writer.add_tensor("blk.0.time_mix_key.weight", np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(path)
    assert checkpoint.config is None
    assert not checkpoint.coded
    assert list(checkpoint.weights) == ["blk.0.time_mix_key.weight"]


@pytest.mark.parametrize("architecture", ["llama", "unknown"])
def test_gguf_vector_is_decoded_as_one_row(architecture: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", architecture)
    writer.add_tensor("output_norm.weight", blocks[0], raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (weight,) = open_checkpoint(tmp_path / "x.gguf").coded.values()
    right = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)[0]
    assert weight.shape == (64,)
    np.testing.assert_array_equal(CodedSource(weight).read().numpy(), right)
    np.testing.assert_array_equal(CodedSource(weight).rows(3, 40).numpy(), right[3:40])


@pytest.mark.parametrize("heads", [[2, 2], False, 3])
def test_head_counts_that_contradict_the_weights_are_refused(
    heads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = {list: "add_array", bool: "add_bool", int: "add_uint32"}[type(heads)]
    field = "llama.attention.head_count_kv"
    monkeypatch.setattr(gguf.GGUFWriter, "add_head_count_kv", lambda self, count: getattr(self, add)(field, heads))
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**_SIZES | {"num_key_value_heads": 4})
    )
    _write(tmp_path / "model.gguf", "llama", model, gguf.GGMLQuantizationType.Q8_0)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert checkpoint.config is None
    assert "blk.0.attn_k.weight" in checkpoint.coded
