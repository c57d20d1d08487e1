"""NVFP4's scale of the tensor, shared by what runtimes fuse: llm-compressor's rule, with compressed-tensors' figures."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization.utils import generate_gparam
from safetensors.torch import load_file, save_file

import dtype_engine as de
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.source import locate
from dtype_engine.core import dtypes
from dtype_engine.runtime.formats import nvfp4
from dtype_engine.runtime.formats.dequantize import dequantize
from dtype_engine.runtime.modes.candidate import candidate_value
from dtype_engine.runtime.session.verify import verify

ATTENTION = "model.layers.0.self_attn"
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "tie_word_embeddings": False}


@pytest.fixture
def llama(make_llama: Callable[..., Path]) -> Path:
    """A model whose q, k and v are of very different sizes."""
    source = make_llama(dtype="bfloat16", **WIDE)
    file = source / "model.safetensors"
    tensors = load_file(file)
    for name, factor in (("q", 1.0), ("k", 5.0), ("v", 0.25)):
        tensors[f"{ATTENTION}.{name}_proj.weight"] *= factor
    save_file(tensors, file, {"format": "pt"})
    return source


def global_scale(tensors: dict[str, torch.Tensor], *layers: str) -> float:
    """What llm-compressor gives the layers of a group: one over the smallest and the largest of all their weights."""
    weights = [tensors[f"{layer}.weight"].float() for layer in layers]
    return float(generate_gparam(min(weight.min() for weight in weights), max(weight.max() for weight in weights)))


def test_nvfp4_export_has_the_shared_scales_of_llm_compressor(llama: Path, tmp_path: Path) -> None:
    session = de.open(str(llama))
    session.cast("*_proj", "nvfp4")
    session.export(tmp_path / "out")
    before, after = load_file(llama / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for group in (
        [f"{ATTENTION}.{name}_proj" for name in "qkv"],
        [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")],
        ["model.layers.0.mlp.down_proj"],
        [f"{ATTENTION}.o_proj"],
    ):
        expected = global_scale(before, *group)
        assert [float(after[f"{layer}.weight_global_scale"]) for layer in group] == [expected] * len(group)
    assert verify(tmp_path / "out", locate(str(llama))).differences == ()

    # What was measured is what was written: codes times both scales.
    opened = de.open(str(tmp_path / "out"))
    for name in (f"{ATTENTION}.k_proj.weight", f"{ATTENTION}.v_proj.weight"):
        live, written = session.model.weights[name], opened.model.weights[name]
        assert torch.equal(candidate_value(live, torch.float32), candidate_value(written, torch.float32))


def test_verify_finds_an_nvfp4_scale_that_should_be_shared(llama: Path, tmp_path: Path) -> None:
    """In the changed export, one layer has a scale of its own, as if layers were not fused."""
    out = tmp_path / "out"
    session = de.open(str(llama))
    session.cast("*_proj", "nvfp4")
    session.export(out)
    file = out / "model.safetensors"
    tensors = load_file(file)
    metadata = dict(open_checkpoint(out).metadata)
    name = f"{ATTENTION}.v_proj.weight_global_scale"
    tensors[name] = torch.tensor([global_scale(load_file(llama / "model.safetensors"), f"{ATTENTION}.v_proj")])
    save_file(tensors, file, metadata)
    (difference,) = verify(out, locate(str(llama))).differences
    assert difference.name == f"{ATTENTION}.v_proj.weight"


def test_cast_changes_fused_weights_only_if_they_share_a_scale(llama: Path) -> None:
    session = de.open(str(llama))
    q, k, v = (session.model.weights[f"{ATTENTION}.{name}_proj.weight"] for name in "qkv")

    def values(weight: object) -> torch.Tensor:
        assert isinstance(weight, type(q))
        assert weight.scale is not None
        from dtype_engine.core import dtypes

        return dequantize(weight.tensor.data, weight.scale, torch.float32, dtypes.BY_NAME["nvfp4"].blocks)

    session.cast("*.v_proj", "nvfp4")
    alone, held = values(v), v.tensor.data
    assert v.shares == ()
    session.cast("*.q_proj", "mxfp4")
    assert v.tensor.data.data_ptr() == held.data_ptr(), "nothing that it depends on was cast"
    session.cast("*.k_proj", "nvfp4")
    assert v.shares == k.shares == (k.info.name, v.info.name)
    assert not torch.equal(values(v), alone)
    session.cast("*.k_proj", "bfloat16")
    assert torch.equal(values(v), alone)


def test_fused_weights_with_and_without_a_rounding_share_the_scale_of_the_tensor(llama: Path) -> None:
    session = de.open(str(llama))
    session.cast("*.[qkv]_proj", "nvfp4")
    q, k, v = (session.model.weights[f"{ATTENTION}.{name}_proj.weight"] for name in "qkv")
    held = q.tensor.data
    largest = max(weight.stored.read(torch.device("cpu")).float().abs().max() for weight in (q, k, v))
    session.cast("*.k_proj", "nvfp4:imatrix")
    session.cast("*.v_proj", "nvfp4:gptq")
    assert q.shares == k.shares == v.shares == (q.info.name, k.info.name, v.info.name)
    assert q.tensor.data.data_ptr() == held.data_ptr(), "its scale is as before"
    for weight in (k, v):
        assert weight.scale is not None
        of_blocks = weight.scale * nvfp4.tensor_scale(largest)
        torch.testing.assert_close(of_blocks, of_blocks.to(torch.float8_e4m3fn).float(), rtol=1e-6, atol=0)
    session.cast("*.k_proj", "bfloat16")
    assert v.shares == (q.info.name, v.info.name)


def test_outputs_of_weights_whose_shared_scale_changed_are_not_reused(llama: Path) -> None:
    """v is used after q: a cast of v changes q's values, so what q gave before must run again."""
    session = de.open(str(llama))
    session.cast("*.q_proj", "nvfp4")
    session.drift()
    session.cast("*.k_proj", "nvfp4")
    reused = session.drift().output
    fresh = de.open(str(llama))
    fresh.cast("*.q_proj", "nvfp4")
    fresh.cast("*.k_proj", "nvfp4")
    assert fresh.drift().output == reused


def test_export_gives_a_notice_about_fused_weights_in_different_formats(llama: Path, tmp_path: Path) -> None:
    session = de.open(str(llama))
    session.cast("*.q_proj", "nvfp4")
    notices = session.export(tmp_path / "out").notices
    assert any(
        "1 group of weights that they fuse has several formats" in notice
        and "q_proj nvfp4, k_proj bfloat16, v_proj bfloat16" in notice
        for notice in notices
    )
    session.cast("*.[kv]_proj", "nvfp4")
    assert not any("fuse" in notice for notice in session.export(tmp_path / "two").notices)


def test_scan_scores_a_weight_with_the_scale_shared_by_its_fused_group(llama: Path) -> None:
    """Each weight is tested alone in a plain module, with the values that it has if q, k and v all are in the format."""
    session = de.open(str(llama), inputs={"input_ids": torch.arange(2, 14)[None]})
    exact = session.scan(["nvfp4"], exact=True).scores()
    estimate = session.scan(["nvfp4"], draws=200).scores()
    session.cast("*_proj", "nvfp4")
    reference = copy.deepcopy(session.model.module)
    values = {}
    for name in ("q_proj", "v_proj"):
        weight = session.model.weights[f"{ATTENTION}.{name}.weight"]
        assert weight.scale is not None
        values[name] = dequantize(weight.tensor, weight.scale, torch.float32, dtypes.BY_NAME["nvfp4"].blocks)
    for name, weight in session.model.weights.items():
        if weight.info.kind == "parameter":
            reference.get_parameter(name).data = weight.stored.read(weight.tensor.device).float()
    batch = session.need_inputs().batches[0]
    with torch.no_grad():
        log_p = reference(**batch.kwargs).logits.cpu().double().log_softmax(-1)
        for name, value in values.items():
            layer = reference.get_submodule(f"{ATTENTION}.{name}")
            kept, layer.weight.data = layer.weight.data, value
            log_q = reference(**batch.kwargs).logits.cpu().double().log_softmax(-1)
            layer.weight.data = kept
            expected = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
            key = (f"{ATTENTION}.{name}.weight", "nvfp4")
            assert exact[key] == pytest.approx(expected, rel=1e-3)
            assert estimate[key] == pytest.approx(expected, rel=0.25)
