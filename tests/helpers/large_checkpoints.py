"""A checkpoint with the shape of DeepSeek-V3: real headers over sparse files, so that it takes no room on the disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

LAYERS, DENSE_LAYERS, EXPERTS, SHARDS = 61, 3, 256, 158
HIDDEN, VOCABULARY, DENSE_WIDTH, EXPERT_WIDTH = 7168, 129280, 18432, 2048
BLOCK = 128  # one scale for each block of 128 x 128 weights

Spec = tuple[str, str, tuple[int, ...]]
_BITS = {"F8_E4M3": 8, "BF16": 16, "F32": 32}


def tensors() -> Iterator[Spec]:
    """(name, safetensors dtype, shape) of all 90 427 tensors, in the order of the layers."""
    yield "model.embed_tokens.weight", "BF16", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield from _attention(f"{prefix}.self_attn")
        if layer < DENSE_LAYERS:
            yield from _gated(f"{prefix}.mlp", DENSE_WIDTH)
        else:
            for expert in range(EXPERTS):
                yield from _gated(f"{prefix}.mlp.experts.{expert}", EXPERT_WIDTH)
            yield f"{prefix}.mlp.gate.weight", "BF16", (EXPERTS, HIDDEN)
            yield f"{prefix}.mlp.gate.e_score_correction_bias", "F32", (EXPERTS,)
            yield from _gated(f"{prefix}.mlp.shared_experts", EXPERT_WIDTH)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", "BF16", (HIDDEN,)
    yield "model.norm.weight", "BF16", (HIDDEN,)
    yield "lm_head.weight", "BF16", (VOCABULARY, HIDDEN)


def _attention(prefix: str) -> Iterator[Spec]:
    yield from _linear(f"{prefix}.q_a_proj", 1536, HIDDEN)
    yield f"{prefix}.q_a_layernorm.weight", "BF16", (1536,)
    yield from _linear(f"{prefix}.q_b_proj", 24576, 1536)
    yield from _linear(f"{prefix}.kv_a_proj_with_mqa", 576, HIDDEN)
    yield f"{prefix}.kv_a_layernorm.weight", "BF16", (512,)
    yield from _linear(f"{prefix}.kv_b_proj", 32768, 512)
    yield from _linear(f"{prefix}.o_proj", HIDDEN, 16384)


def _gated(prefix: str, width: int) -> Iterator[Spec]:
    yield from _linear(f"{prefix}.gate_proj", width, HIDDEN)
    yield from _linear(f"{prefix}.up_proj", width, HIDDEN)
    yield from _linear(f"{prefix}.down_proj", HIDDEN, width)


def _linear(prefix: str, rows: int, columns: int) -> Iterator[Spec]:
    yield f"{prefix}.weight", "F8_E4M3", (rows, columns)
    yield f"{prefix}.weight_scale_inv", "F32", (-(-rows // BLOCK), -(-columns // BLOCK))


def write(folder: Path) -> Path:
    """Write the whole checkpoint: 158 sparse shards, the index, and `config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = list(tensors())
    sizes = [_nbytes(spec) for spec in everything]
    most = sum(sizes) // SHARDS + 1
    weight_map: dict[str, str] = {}
    shards: list[list[Spec]] = [[]]
    filled = 0
    for spec, size in zip(everything, sizes, strict=True):
        if filled + size > most * len(shards) and shards[-1] and len(shards) < SHARDS:
            shards.append([])
        shards[-1].append(spec)
        filled += size
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        _write_shard(folder / name, shard)
        weight_map |= {tensor: name for tensor, _, _ in shard}
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": LAYERS,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def sparse_file(path: Path, count: int) -> Path:
    """Write `count` weights of 16 MiB, all zeros, that take no room on the disk. Nothing says what could run them."""
    _write_shard(path, [(f"layers.{index}.mlp.weight", "F32", (2048, 2048)) for index in range(count)])
    return path


def _nbytes(spec: Spec) -> int:
    count = 1
    for extent in spec[2]:
        count *= extent
    return count * _BITS[spec[1]] // 8


def _write_shard(path: Path, shard: list[Spec]) -> None:
    at, header = 0, {}
    for name, dtype, shape in shard:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + _nbytes((name, dtype, shape))]}
        at += _nbytes((name, dtype, shape))
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + at)
