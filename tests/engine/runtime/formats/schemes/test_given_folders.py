"""Decodes every checkpoint in the folder that the environment variable DTYPE_TUI_QUANTISED names, and compares it with its truth.

Each checkpoint's folder has `truth.safetensors.xz`, the right values of the quantized weights in float32 under the names of
transformers, and `truth.json`, which has under "plain" the SHA-256 of the float32 bytes of each other parameter. All values must be
equal, bit for bit but for the sign of zero. Experts may be stored one by one or stacked.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.runtime.weights.coded import CodedSource
from dtype_engine.runtime.weights.files import read_mapped

_GIVEN = Path(os.environ.get("DTYPE_TUI_QUANTISED") or "/nonexistent")
_FOLDERS = sorted(path.parent.name for path in _GIVEN.glob("*/truth.json"))
_DEEPSEEK_V4 = (
    (r"^embed\.", "model.embed_tokens."), (r"^head\.", "lm_head."), (r"^(layers|norm)\.", r"model.\1."),
    (r"^hc_head_", "model.hc_head.hc_"), (r"\.hc_(attn|ffn)_", r".\1_hc."), (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."), (r"\.ffn\.", ".mlp."), (r"\.w1\.", ".gate_proj."), (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."), (r"\.gate\.bias$", ".gate.e_score_correction_bias"), (r"\.indexer\.compressor\.", ".indexer."),
    (r"\.attn\.indexer\.", ".attn.compressor.indexer."), (r"\.weights_proj\.", ".scorer.weights_proj."),
    (r"\.ape$", ".position_bias"), (r"compressor\.(indexer\.)?norm\.", r"compressor.\1kv_norm."),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
    (r"\.attn\.q_norm\.", ".attn.q_a_norm."), (r"\.attn_sink$", ".sinks"), (r"\.w(q_a|q_b|kv|gate|o_a|o_b)\.", r".\1_proj."),
    (r"\.attn\.", ".self_attn."),
)  # fmt: skip
"""Maps the names in the files of DeepSeek-V4 to those of transformers, which renames the modules when it loads them."""


def _renamed(name: str, model_type: object) -> str:
    for pattern, new in _DEEPSEEK_V4 if model_type == "deepseek_v4" else ():
        name = re.sub(pattern, new, name)
    return name


def _found(values: Mapping[str, np.ndarray], name: str) -> np.ndarray | None:
    """Return the values under a name of the truth. They may be stored as one of stacked experts, or as experts one by one."""
    if name in values:
        return values[name]
    stacked = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
    one = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if stacked is not None:
        kinds = ("gate_proj", "up_proj") if stacked[2] == "gate_up_proj" else ("down_proj",)
        experts = []
        while all(f"{stacked[1]}.{len(experts)}.{kind}.weight" in values for kind in kinds):
            experts.append(np.concatenate([values[f"{stacked[1]}.{len(experts)}.{kind}.weight"] for kind in kinds]))
        return np.stack(experts) if experts else None
    if (
        one is not None
        and (all_of := values.get(f"{one[1]}.{'down_proj' if one[3] == 'down' else 'gate_up_proj'}")) is not None
    ):
        expert = all_of[int(one[2])]
        half = len(expert) // 2
        return expert if one[3] == "down" else expert[:half] if one[3] == "gate" else expert[half:]
    return None


@pytest.mark.skipif(not _FOLDERS, reason="DTYPE_TUI_QUANTISED names no folder of quantized checkpoints")
@pytest.mark.parametrize("folder", _FOLDERS)
def test_decoded_weights_of_given_checkpoints_equal_their_reference_values(folder: str) -> None:
    path = _GIVEN / folder
    single = path / "model.safetensors"
    checkpoint = open_checkpoint(
        path if single.exists() else next(iter((*path.glob("*.gguf"), *path.glob("*.safetensors"))))
    )
    model_type = (checkpoint.config or {}).get("model_type")
    coded = checkpoint.coded
    parts = {tensor.name for weight in coded.values() for tensor in weight.tensors}
    values = {_renamed(name, model_type): CodedSource(weight).read().numpy() for name, weight in coded.items()}
    for name, tensor in checkpoint.tensors.items():
        if name not in parts and tensor.dtype in ("float32", "bfloat16", "float16"):
            own = checkpoint.renamed.get(name, name)
            values.setdefault(_renamed(own, model_type), read_mapped(tensor).float().numpy())
    truth = safetensors.numpy.load(lzma.decompress((path / "truth.safetensors.xz").read_bytes()))
    faults = []
    for name, right in truth.items():
        got = _found(values, name)
        if got is None or got.shape != right.shape or not np.array_equal(got, right):
            faults.append(name)
    for name, plain in json.loads((path / "truth.json").read_text())["plain"].items():
        got = _found(values, name)
        if got is None or hashlib.sha256(np.ascontiguousarray(got).tobytes()).hexdigest() != plain["sha256"]:
            faults.append(f"{name} (not quantized)")
    for name, weight in coded.items():
        rows = weight.shape[0]
        part = CodedSource(weight).rows(rows // 3, rows - 1).numpy()
        if not np.array_equal(part, values[_renamed(name, model_type)][rows // 3 : rows - 1]):
            faults.append(f"{name} (some of its rows)")
    assert truth
    assert not faults
