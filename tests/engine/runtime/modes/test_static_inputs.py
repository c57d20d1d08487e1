"""Inputs of quantized layers, rounded with the scale that the files have for them: against plain transformers with decoded weights,
whose inputs numpy rounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import dtype_engine as de
from dtype_engine.core.cancellation import never
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner

Make = Callable[..., Path]
Array = np.ndarray[Any, Any]
IDS = torch.arange(24).reshape(1, 24)
ROUNDED = de.RunSettings(quantize_activations="weights")
SCALE = 0.006
"""So small that some inputs saturate."""
_FP8, _INT8 = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}


def _compressed(**each: Any) -> dict[str, Any]:
    arguments = {"symmetric": True, "strategy": "tensor", "dynamic": False, **each}
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": arguments}
    form = "float-quantized" if each["type"] == "float" else "int-quantized"
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"all": group | {"format": form}}}


CONFIGS: dict[str, dict[str, Any]] = {
    "compressed-tensors fp8": _compressed(**_FP8),
    "compressed-tensors int8": _compressed(**_INT8),
    "ModelOpt fp8": {"quant_method": "modelopt", "quant_algo": "FP8"},
}


def _fp8(values: Array, scale: float) -> Array:
    codes = np.clip(values / np.float32(scale), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return np.asarray(codes.astype(np.float32) * np.float32(scale))


def _int8(values: Array, scale: float) -> Array:
    return np.asarray(np.clip(np.rint(values / np.float32(scale)), -128, 127) * np.float32(scale))


def _nvfp4(values: Array, scale: float) -> Array:
    """`scale` is ModelOpt's: the largest value divided by 448 * 6."""
    groups = values.reshape(*values.shape[:-1], -1, 16)
    blocks = np.minimum(np.abs(groups).max(-1, keepdims=True) / np.float32(6) / np.float32(scale), 448)
    blocks = blocks.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    blocks = np.where(blocks == 0, np.float32(0.125), blocks) * np.float32(scale)
    codes = np.clip(groups / blocks, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return np.asarray((codes * blocks).reshape(values.shape))


def _logits(session: de.Session) -> torch.Tensor:
    assert session.inputs is not None
    with ForwardRunner(session.model, session.settings, never) as runner:
        return main_output(runner.candidate(runner.candidate_call(session.inputs.batches[0])).output)[1].cpu().double()


def _by_hand(folder: Path, weights: dict[str, torch.Tensor], rounds: Callable[[str, Array], Array]) -> torch.Tensor:
    """What transformers computes with these weights if inputs of their layers are rounded."""
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.load_state_dict(weights)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":

            def hook(_: Any, args: tuple[torch.Tensor], name: str = name) -> tuple[torch.Tensor]:
                return (torch.from_numpy(rounds(name, args[0].numpy())),)

            layer.register_forward_pre_hook(hook)
    with torch.no_grad():
        return model(IDS).logits.double()


@pytest.mark.parametrize("scheme", CONFIGS)
def test_stored_static_scale_is_used_to_quantize_inputs(scheme: str, make_llama: Make, tmp_path: Path) -> None:
    plain = make_llama(tie_word_embeddings=False)
    rounds = _int8 if "int8" in scheme else _fp8
    stored, decoded, scales = {}, dict[str, torch.Tensor](), dict[str, float]()
    for number, (name, tensor) in enumerate(load_file(plain / "model.safetensors").items()):
        stored[name] = decoded[name] = tensor.float()
        if "proj" in name:
            scale = float(tensor.abs().max()) / (127 if "int8" in scheme else 448)
            decoded[name] = torch.from_numpy(rounds(tensor.float().numpy(), scale))
            codes = decoded[name] / scale
            stored[name] = codes.round().to(torch.int8) if "int8" in scheme else codes.to(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = torch.tensor([scale])
            module = name.removesuffix(".weight")
            scales[module] = SCALE * (1 + number / 50) * (4 if "int8" in scheme else 1)
            stored[f"{module}.input_scale"] = torch.tensor([scales[module]])
    config = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": CONFIGS[scheme] | {"ignore": ["lm_head"]}})
    )
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    session = de.open(str(tmp_path), inputs={"input_ids": IDS})
    assert any("--quantize-activations weights" in notice for notice in session.model.notices)
    alone = _logits(session)
    session.settings = ROUNDED
    expected = _by_hand(tmp_path, decoded, lambda name, values: rounds(values, scales[name]))
    assert float((_logits(session) - expected).abs().max()) < 1e-4
    assert float((alone - expected).abs().max()) > 1e-3, "the rounding makes a difference"
    session.cast("*.mlp", "float32")
    wide = _by_hand(tmp_path, decoded, lambda name, values: values if ".mlp." in name else rounds(values, scales[name]))
    assert float((_logits(session) - wide).abs().max()) < 1e-4


def test_stored_static_scale_is_used_to_quantize_inputs_to_nvfp4(make_llama: Make, tmp_path: Path) -> None:
    """compressed-tensors stores the reciprocal. The scale is for half of the largest input, so that others saturate."""
    plain = make_llama(tie_word_embeddings=False)
    session = de.open(str(plain), options=de.Options(settings=ROUNDED), inputs={"input_ids": IDS})
    session.cast("*_proj", "nvfp4")
    session.export(tmp_path / "out")
    decoded = {name: weight.tensor.data for name, weight in session.model.weights.items() if weight.scale is None}
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    scales = {}
    for name in [name for name in tensors if name.endswith("input_global_scale")]:
        tensors[name] *= 2
        scales[name.removesuffix(".input_global_scale")] = 1 / float(tensors[name])
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})  # without this program's metadata
    found = de.open(str(tmp_path / "out"), options=de.Options(settings=ROUNDED), inputs={"input_ids": IDS})
    decoded |= {
        name: weight.stored.read() for name, weight in found.model.weights.items() if weight.stored.format == "ct:nvfp4"
    }
    assert len(scales) == 14
    del decoded["model.rotary_emb.inv_freq"], decoded["model.rotary_emb.original_inv_freq"]
    expected = _by_hand(tmp_path / "out", decoded, lambda name, values: _nvfp4(values, scales[name]))
    assert float((_logits(found) - expected).abs().max()) < 1e-4


def test_invalid_stored_scale_of_inputs_is_refused(make_llama: Make, tmp_path: Path) -> None:
    plain = make_llama(num_hidden_layers=1)
    stored = load_file(plain / "model.safetensors")
    for name in [name for name in stored if "q_proj" in name]:
        stored[name] = stored[name].to(torch.float8_e4m3fn)
        stored[f"{name}_scale"], stored[name.replace("weight", "input_scale")] = torch.ones(1), torch.zeros(1)
    config = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS["ModelOpt fp8"]}))
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    session = de.open(str(tmp_path), inputs={"input_ids": IDS})
    session.drift()
    session.settings = ROUNDED
    with pytest.raises(de.NoForward, match=r"input_scale is 0\.0, which can't be a scale of inputs"):
        session.drift()
