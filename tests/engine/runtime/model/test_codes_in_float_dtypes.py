"""Codes that bitsandbytes stores under the dtype of plain weights: which tensors are codes is decided by what belongs to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.helpers.file_edits import change_tensors

import dtype_engine as de
from dtype_engine.cli import cli, run
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import Options
from dtype_engine.runtime.building.load import load_pretrained

NF4 = torch.tensor(
    [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
     0.24611230, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
)  # fmt: skip
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 96,
         "tie_word_embeddings": False}  # fmt: skip


@pytest.fixture(params=["bfloat16", "float16", "float32", "uint8"])
def quantized(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A model whose NF4 codes are stored under a dtype, with plain weights in the same dtype if it is one for values; and the same
    weights without codes.
    """
    kind: str = request.param
    dtype, torch_dtype = getattr(torch, kind), getattr(torch, kind if kind != "uint8" else "bfloat16")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    files: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, value in transformers.LlamaForCausalLM(config).state_dict().items():
        if not name.endswith("_proj.weight"):
            files[name] = plain[name] = value.to(torch_dtype).contiguous()
            continue
        blocks = value.reshape(-1, 64)
        absmax = blocks.abs().amax(1)
        codes = ((blocks / absmax[:, None])[..., None] - NF4).abs().argmin(-1).to(torch.uint8).flatten()
        plain[name] = (NF4[codes.long()].reshape(-1, 64) * absmax[:, None]).reshape(value.shape)
        said = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(value.shape)})
        files |= {
            name: (codes[0::2] << 4 | codes[1::2]).view(dtype)[:, None].contiguous(), f"{name}.absmax": absmax,
            f"{name}.quant_map": NF4.clone(),
            f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(said.encode()), dtype=torch.uint8),
        }  # fmt: skip
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True, "load_in_8bit": False,
                "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": kind}  # fmt: skip
    said_config = config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    for folder, held, more in (
        (tmp_path / "codes", files, {"quantization_config": settings}), (tmp_path / "plain", plain, {})
    ):  # fmt: skip
        folder.mkdir()
        save_file(held, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(said_config | more))
    return tmp_path / "codes", tmp_path / "plain"


def test_bitsandbytes_codes_stored_as_bfloat16_are_opened_with_their_values(
    quantized: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    codes, plain = quantized
    options = Options(device="cpu", reference=str(plain))
    session = de.open(str(codes), options=options, inputs={"input_ids": torch.arange(1, 17)[None]})
    session.apply(de.Recipe((de.Rule("*", "float32"),)))
    assert session.drift().output.max_abs == 0
    assert run(cli, "dtype-engine", ["weights", str(plain), "--against", str(codes)]) == 0
    assert run(cli, "dtype-engine", ["check", str(codes)]) == 0
    assert "nothing found" in capsys.readouterr().out
    found = load_pretrained(codes).state_dict()
    for name, right in load_file(plain / "model.safetensors").items():
        assert torch.equal(found[name], right.to(found[name].dtype)), name


def test_bitsandbytes_codes_stored_as_bfloat16_are_exported_with_their_values(
    quantized: tuple[Path, Path], tmp_path: Path
) -> None:
    codes, plain = quantized
    assert run(cli, "dtype-engine", ["export", str(codes), "--cast", "*=f32", "-o", str(tmp_path / "out")]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    right = load_file(plain / "model.safetensors")
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert torch.equal(found[name], tensor.float()), name
    assert run(cli, "dtype-engine", ["export", str(codes), "-o", str(tmp_path / "same")]) == 0
    copied, source = (load_file(folder / "model.safetensors") for folder in (tmp_path / "same", codes))
    assert all(torch.equal(copied[name].view(torch.uint8), source[name].view(torch.uint8)) for name in source)


def test_check_finds_bitsandbytes_codes_without_scales(
    quantized: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    codes, _ = quantized
    name = "model.layers.0.mlp.down_proj.weight"
    change_tensors(codes, lambda tensors: tensors.pop(f"{name}.absmax"))
    assert run(cli, "dtype-engine", ["check", str(codes), "--no-modules"]) == 1
    assert f"{name}.absmax" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"not one model|no forward pass"):
        de.open(str(codes), options=Options(device="cpu"))


def test_check_finds_bitsandbytes_codes_with_too_few_scales(
    quantized: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    codes, _ = quantized
    name = "model.layers.0.mlp.down_proj.weight.absmax"
    change_tensors(codes, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    assert run(cli, "dtype-engine", ["check", str(codes), "--no-modules"]) == 1
    assert f"{name} is [127], where the codes" in capsys.readouterr().out.replace("  ", " ")
