"""Checkpoints of compressed-tensors: the reference has the weights that codes and scales give in float32, decoded here by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.helpers.measured_on import placed

import dtype_engine as de

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def of_another_program(source: Path, folder: Path, dtype: str) -> dict[str, torch.Tensor]:
    """An export without the metadata of this program, with scales in bfloat16 as llm-compressor writes them."""
    session = de.open(str(source))
    session.cast("*_proj", dtype)
    session.export(folder)
    file = folder / "model.safetensors"
    tensors = {
        name: tensor.bfloat16() if name.endswith("weight_scale") and tensor.dtype == torch.float32 else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    return tensors


def by_hand(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights in float32: codes times scales; codes of four bits have the lowest bits first, and of integers 8 is zero."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("weight_packed") and tensor.dtype == torch.uint8:
            codes = E2M1[torch.stack((tensor & 15, tensor >> 4), -1).flatten(1).long()]
            scale = (
                tensors[name.replace("_packed", "_scale")].float() / tensors[name.replace("_packed", "_global_scale")]
            )
            found[name.removesuffix("_packed")] = codes * scale.repeat_interleave(16, 1)
        elif name.endswith("weight_packed"):
            bits = torch.arange(0, 32, 4, dtype=torch.int32)
            codes = ((tensor[..., None] >> bits) & 15).flatten(1).float() - 8
            scale = tensors[name.replace("_packed", "_scale")].float()
            found[name.removesuffix("_packed")] = codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
        elif name.endswith(".weight"):
            scale = tensors.get(f"{name}_scale", torch.ones(1))
            found[name] = tensor.float() * scale.float()
    return found


@pytest.mark.parametrize("dtype", ["int4@g32", "int8", "float8_e4m3fn", "nvfp4"])
def test_reference_of_compressed_tensors_weights_has_their_decoded_values(
    dtype: str, make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_llama(dtype="bfloat16", tie_word_embeddings=False, intermediate_size=64)
    weights = by_hand(of_another_program(source, tmp_path / "out", dtype))
    config = json.loads((source / "config.json").read_text())
    config.pop("dtype")
    wide, narrow = (transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval() for _ in range(2))
    for model in (wide, narrow):
        model.load_state_dict(weights)
    for parameter in narrow.parameters():
        parameter.data = parameter.data.bfloat16()
    ids = torch.randint(3, 60, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        r, c = (placed(model)(input_ids=ids).logits.cpu().double() for model in (wide, narrow))
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    session = de.open(str(tmp_path / "out"), options=de.Options(tensors=tmp_path / "ids.safetensors"))
    report = session.drift()
    assert report.output.mean_abs == pytest.approx(float((r - c).abs().mean()), rel=1e-6)
    assert report.output.sqnr_db == pytest.approx(20 * float((r.norm() / (r - c).norm()).log10()), rel=1e-6)
    assert report.notices == ()
    packed = sum(tensor.nbytes for tensor in load_file(tmp_path / "out" / "model.safetensors").values())
    assert session.model.resident_bytes == packed + sum(buffer.nbytes for buffer in session.model.module.buffers())
    session.cast("*_proj", "float16")
    for name, value in weights.items():
        if "_proj" in name:
            assert torch.equal(session.model.weights[name].tensor, value.half())
