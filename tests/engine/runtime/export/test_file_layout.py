"""Exports in GPTQ's layout: what is in the files by its documentation, what is refused, and what reads it back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.exporting import engine
from tests.helpers.file_edits import change_tensors

import dtype_engine as de
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.source import locate
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.runtime.formats.dequantize import dequantize
from dtype_engine.runtime.session.verify import verify

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "tie_word_embeddings": False}
BLOCKS = "model.layers.*.*_proj"
FORMATS = {
    "int4@g32:gptq": ("gptq", [f"{BLOCKS}=int4@g32:gptq"]),
    "int4@g128": ("gptq", [f"{BLOCKS}=int4@g128"]),
    "int8@g128": ("gptq", [f"{BLOCKS}=int8@g128"]),
    "int4@g128a": ("gptq_v2", [f"{BLOCKS}=int4@g128a"]),
    "mixed": ("gptq", ["model.layers.0.mlp=int4@g32", "model.layers.0.self_attn=int8@g128"]),
    "mixed with zero points": (
        "gptq_v2",
        ["model.layers.0.mlp=int4@g128a", "model.layers.1.*.*_proj=int4@g32", "lm_head=int8@g128"],
    ),
}


@pytest.fixture
def llama(make_llama: Callable[..., Path]) -> Path:
    return make_llama(dtype="bfloat16", **WIDE)


def unpacked(words: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Return the unsigned codes in words [rows, words], the first in the lowest bits: [rows, codes]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return ((words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)).reshape(len(words), -1)


def documented(tensors: dict[str, torch.Tensor], layer: str, bits: int, added: int) -> np.ndarray[Any, Any]:
    """Return the values of a layer's weight, float32 [out, in], by the documentation of GPTQ's layout: (q - z) * s, where each
    input has the scale and the zero point of the group that `g_idx` names.
    """
    codes, zeros, scales, groups = (
        tensors[f"{layer}.{name}"].numpy() for name in ("qweight", "qzeros", "scales", "g_idx")
    )
    assert (codes.dtype, zeros.dtype, scales.dtype, groups.dtype) == ("int32", "int32", "float16", "int32")
    q = unpacked(np.ascontiguousarray(codes.T), bits).T.astype(np.int64)
    z = unpacked(zeros, bits).astype(np.int64) + added
    return ((q - z[groups]).astype(np.float32) * scales.astype(np.float32)[groups]).T


@pytest.mark.parametrize("name", FORMATS)
def test_values_by_the_documented_layout_are_those_of_the_session(name: str, llama: Path, tmp_path: Path) -> None:
    layout, casts = FORMATS[name]
    session = de.open(str(llama), options=de.Options(device="cpu", sequences=1))
    for cast in casts:
        session.cast(*cast.split("="))
    out = tmp_path / "out"
    report = session.export(out, layout=layout)
    tensors = load_file(out / "model.safetensors")
    assert report.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    coded = planned_layers(session)
    assert sorted(settings["modules_in_block_to_quantize"][0]) == sorted(coded)
    linears = [each for each, node in session.tree.modules.items() if node.class_name == "Linear"]
    assert {each for each in linears if read_by_others(settings, each) is None} == set(linears) - set(coded)
    for layer, dtype in coded.items():
        blocks = dtypes.BY_NAME[dtype].blocks
        bits = dtypes.BY_NAME[dtype].bits
        assert blocks is not None
        assert read_by_others(settings, layer) == (bits, blocks.columns)
        codes, scale = session.model.weights[f"{layer}.weight"].current()
        held = dequantize(codes, scale, torch.float32, blocks)
        assert np.array_equal(documented(tensors, layer, bits, int(layout == "gptq")), held.numpy())
        assert f"{layer}.weight" not in tensors
    assert settings["sym"] == (not any(dtype.endswith("a") for dtype in coded.values()))
    opened = open_checkpoint(out)
    assert {name: opened.dtype(f"{name}.weight") for name in coded} == {
        name: f"gptq:{dtype.rstrip('a')}" for name, dtype in coded.items()
    }
    checked = verify(out, locate(str(llama)), drift=True, options=session.options)
    assert checked.differences == ()
    assert checked.drift_before == checked.drift_after == session.drift().output


def planned_layers(session: de.Session) -> dict[str, str]:
    """Return the format of each layer with scales."""
    planned = session.plan.dtypes.items()
    return {
        name.removesuffix(".weight"): dtypes.unrounded(dtype)
        for name, dtype in planned
        if dtype in dtypes.STORAGE_DTYPES
    }


def read_by_others(settings: dict[str, Any], layer: str) -> tuple[int, int] | None:
    """Return (bits, group size) that GPTQModel, vLLM and SGLang give to a layer, or None if they take it for unquantized: by the
    first pattern of `dynamic` that matches its name from the beginning.
    """
    for pattern, changed in settings.get("dynamic", {}).items():
        if re.match(pattern[2:], layer):
            return None if pattern.startswith("-:") else (changed["bits"], changed["group_size"])
    return settings["bits"], settings["group_size"]


@pytest.mark.parametrize(
    ("layout", "cast", "why"),
    [
        ("gptq", f"{BLOCKS}=int4@g128a", "model.layers.0.mlp.down_proj.weight .*gptq_v2 holds them"),
        (
            "gptq",
            "model.layers.1.mlp=int8",
            "model.layers.1.mlp.down_proj.weight in int8 can't .*integers in groups alone",
        ),
        ("gptq_v2", "*.o_proj=nvfp4", "o_proj.weight in nvfp4 can't .*integers in groups alone"),
        (
            "gptq",
            "model.embed_tokens=int4@g32",
            "embed_tokens.weight .*only weights of linear layers that are not tied",
        ),
        ("gptq", "lm_head=int8@g128", "lm_head.weight .*packed by 4 outputs, and the layer has 66"),
        ("awq", "lm_head=int4@g32", "the layouts are compressed-tensors, gptq, gptq_v2"),
    ],
)
def test_layout_refuses_the_first_weight_that_it_can_not_hold(
    layout: str, cast: str, why: str, make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    session = de.open(str(make_llama(dtype="bfloat16", **WIDE, vocab_size=66)), options=de.Options(device="cpu"))
    session.cast(*cast.split("="))
    with pytest.raises(UserError, match=why):
        session.export(tmp_path / "out", layout=layout)
    assert not (tmp_path / "out").exists()


def test_scale_that_float16_can_not_hold_is_refused_by_its_weight(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, out = "model.layers.1.mlp.up_proj.weight", tmp_path / "out"
    change_tensors(llama, lambda tensors: tensors[name][3].mul_(1e-5))
    assert engine("export", llama, "--cast", f"{BLOCKS}=int4@g32", "--layout", "gptq", "-o", out) == 2
    assert f"8 of 2048 scales of {name}, such as " in capsys.readouterr().err
    assert not out.exists()


def test_fused_layers_have_the_settings_of_their_members(llama: Path, tmp_path: Path) -> None:
    """vLLM and SGLang look up the name of the layer that they fuse from several."""
    out = tmp_path / "out"
    casts = [part for cast in FORMATS["mixed"][1] for part in ("--cast", cast)]
    assert engine("export", llama, *casts, "--layout", "gptq", "-o", out) == 0
    config = json.loads((out / "config.json").read_text())
    found = {
        name: read_by_others(config["quantization_config"], f"model.layers.{name}")
        for name in ("0.self_attn.qkv_proj", "0.mlp.gate_up_proj", "1.self_attn.qkv_proj", "1.mlp.gate_up_proj")
    }
    assert [*found.values()] == [(8, 128), (4, 32), None, None]
    assert config["transformers_weights"].startswith("not-for-transformers"), "it reads one format for all weights"
    assert "it reads one number of bits" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ("qweight", "1 of 8192 values of model.layers.0.mlp.up_proj.qweight differ"),
        ("scales", "1 of 2048 values of model.layers.0.mlp.up_proj.scales differ"),
        ("qzeros", "has zero points other than the middle"),
        ("g_idx", "does not name the groups in their order"),
    ],
)
def test_verify_finds_one_wrong_value_of_each_tensor(part: str, what: str, llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert engine("export", llama, "--cast", "*.up_proj=int4@g32", "--layout", "gptq", "-o", out) == 0

    def change(tensors: dict[str, torch.Tensor]) -> None:
        held = tensors[f"model.layers.0.mlp.up_proj.{part}"].view(-1)
        held[5] = 2 * held[5] if part == "scales" else held[5] ^ 1

    change_tensors(out, change)
    (difference,) = verify(out, locate(str(llama))).differences
    assert difference.name == "model.layers.0.mlp.up_proj.weight"
    assert what in difference.what
