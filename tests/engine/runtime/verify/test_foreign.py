"""`verify` compares checkpoints that other programs wrote with their source: exact casts, and how far off all else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.file_edits import change_config, change_tensors, write_gguf
from tests.helpers.paths import TINYNET

from dtype_engine.cli import cli
from dtype_engine.cli.program import run

UP = "model.layers.0.mlp.up_proj"
Parts = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors that another program writes for a weight, by the ends of their names, and the values that they stand for."""


@pytest.fixture
def verified(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Return a function that runs `verify OTHER --against SOURCE --json`, checks the exit status and returns the JSON object."""

    def verify(other: Path, source: Path | str, *more: str) -> dict[str, Any]:
        capsys.readouterr()
        status = run(cli, "dtype-engine", ["verify", str(other), "--against", str(source), "--json", *more])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert status == (0 if found["same"] else 1)
        return found

    return verify


def saved_in(dtype: torch.dtype, source: Path, out: Path) -> Path:
    """What plain transformers writes after a cast of the whole model."""
    import transformers

    transformers.LlamaForCausalLM.from_pretrained(source).to(dtype).save_pretrained(out)
    return out


def pack(folder: Path, parts: dict[str, torch.Tensor]) -> None:
    """Store these parts in place of a weight."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{UP}.weight"]
        tensors.update({f"{UP}.{name}": part for name, part in parts.items()})

    change_tensors(folder, change)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_verify_finds_a_model_cast_by_transformers_to_be_an_exact_cast(
    dtype: torch.dtype, make_llama: Callable[..., Path], tmp_path: Path, verified: Callable[..., dict[str, Any]]
) -> None:
    source = make_llama()
    found = verified(saved_in(dtype, source, tmp_path / "other"), source)
    assert found["same"]
    assert (found["differences"], found["uncompared"]) == ([], [])
    wanted = load_file(source / "model.safetensors")
    assert [tensor["name"] for tensor in found["tensors"]] == sorted(wanted)
    for tensor in found["tensors"]:
        before = wanted[tensor["name"]]
        assert (tensor["source_dtype"], tensor["dtype"]) == ("float32", str(dtype).removeprefix("torch."))
        assert (tensor["elements"], tensor["differing"]) == (before.numel(), 0)
        assert tensor["max_abs"] == float((before.to(dtype).double() - before.double()).abs().max())


def test_verify_names_values_that_are_no_exact_casts_with_their_difference(
    make_llama: Callable[..., Path], tmp_path: Path, verified: Callable[..., dict[str, Any]], capsys: Any
) -> None:
    source = make_llama()
    other = saved_in(torch.bfloat16, source, tmp_path / "other")
    before = load_file(source / "model.safetensors")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        norm = tensors["model.norm.weight"].float()
        norm[3:5] += 0.25
        norm[7] = torch.inf
        tensors["model.norm.weight"] = norm.bfloat16()
        tensors[f"{UP}.weight"][0, :2] *= 2
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:-1].clone()
        tensors["new.bias"] = tensors.pop("model.layers.1.input_layernorm.weight")

    change_tensors(other, spoil)
    found = verified(other, source)
    off = {tensor["name"]: tensor for tensor in found["tensors"] if tensor["differing"]}
    assert {name: tensor["differing"] for name, tensor in off.items()} == {"model.norm.weight": 3, f"{UP}.weight": 2}
    delta = (load_file(other / "model.safetensors")[f"{UP}.weight"].double() - before[f"{UP}.weight"].double()).abs()
    assert off[f"{UP}.weight"]["max_abs"] == float(delta.max())
    assert off["model.norm.weight"]["max_abs"] is None  # infinity
    assert {each["name"]: each["what"] for each in found["differences"]} == {
        "model.layers.1.mlp.up_proj.weight": "is [47, 32], and [48, 32] in the source",
        "model.layers.1.input_layernorm.weight": "is in the source alone",
        "new.bias": "is not in the source",
    }
    assert run(cli, "dtype-engine", ["verify", str(other), "--against", str(source)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"differs    {UP}.weight 2 of 1,536 values, max |Δ| {float(delta.max()):.3e}" in lines
    assert lines[-1] == "not all are exact casts: 5 differ"


def test_verify_names_packed_weights_that_it_cannot_compare(
    make_llama: Callable[..., Path], tmp_path: Path, verified: Callable[..., dict[str, Any]]
) -> None:
    source, other = make_llama(), make_llama("other")
    words, zeros = torch.ones(4, 48, dtype=torch.int32), torch.ones(1, 6, dtype=torch.int32)
    pack(other, {"qweight": words, "qzeros": zeros, "scales": torch.ones(1, 48, dtype=torch.float16)})
    (other / "recipe.yaml").write_text("quant_stage:\n  quant_modifiers: {}\n")  # as other programs leave one
    for one, against, where in ((other, source, ""), (source, other, " in the source")):
        found = verified(one, against)
        assert found["uncompared"] == [{"name": f"{UP}.weight", "what": f"is packed by GPTQ or AWQ{where}"}]
        assert found["differences"] == []
        assert {tensor["differing"] for tensor in found["tensors"]} == {0}
    found = verified(other, other)
    assert found["same"], "equal codes need no decoding"
    assert len(found["tensors"]) == 22


def _fp8_rows(weight: torch.Tensor) -> Parts:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(3.0)}, codes.float() * scale.float()


def _fp8_blocks(weight: torch.Tensor, columns: int) -> Parts:
    """Blocks of 32 rows and so many columns, the last ones shorter: rows are 48, columns 32."""
    scales = torch.rand(2, -(-32 // columns)) / 100 + 0.01
    codes, values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for row, of_row in enumerate(scales):
        for column, scale in enumerate(of_row):
            place = slice(32 * row, 32 * row + 32), slice(columns * column, columns * (column + 1))
            codes[place] = (weight[place] / scale).to(torch.float8_e4m3fn)
            values[place] = codes[place].float() * scale
    return {"weight": codes, "weight_scale_inv": scales}, values


def _mxfp8(weight: torch.Tensor) -> Parts:
    exponents = torch.randint(119, 124, (48, 1), dtype=torch.uint8)
    scales = (2.0 ** (exponents.double() - 127)).float()
    codes = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": exponents}, codes.float() * scales


def _int8_with_zero_points(weight: torch.Tensor) -> Parts:
    scale, zero = torch.rand(48, 1) / 200 + 6e-3, torch.randint(-9, 9, (48, 1), dtype=torch.int8)
    codes = ((weight / scale).round() + zero).clamp(-128, 127).to(torch.int8)
    parts = {"weight": codes, "weight_scale": scale, "weight_zero_point": zero}
    return parts, (codes.float() - zero.float()) * scale


def _bitsandbytes(weight: torch.Tensor) -> Parts:
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    parts = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, codes.float() * largest[:, None] / 127


def _compressed(**weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, **weights}}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


SCALED: dict[str, tuple[Callable[[torch.Tensor], Parts], dict[str, Any]]] = {
    "fp8 rows": (_fp8_rows, _compressed(type="float", strategy="channel", symmetric=True)),
    "fp8 blocks of whole rows": (
        lambda weight: _fp8_blocks(weight, 32),
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
    ),
    "fp8 blocks, ragged": (
        lambda weight: _fp8_blocks(weight, 24),
        {"quant_method": "fp8", "weight_block_size": [32, 24]},
    ),
    "mxfp8": (_mxfp8, _compressed(type="float", strategy="group", group_size=32, symmetric=True)),
    "int8 with zero points": (_int8_with_zero_points, _compressed(type="int", strategy="channel", symmetric=False)),
    "bitsandbytes": (_bitsandbytes, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


@pytest.mark.parametrize("form", SCALED)
def test_verify_decodes_8_bit_codes_of_other_programs(
    form: str, make_llama: Callable[..., Path], verified: Callable[..., dict[str, Any]]
) -> None:
    make, declared = SCALED[form]
    source, other = make_llama(initializer_range=0.2), make_llama("other", initializer_range=0.2)
    weight = load_file(source / "model.safetensors")[f"{UP}.weight"]
    parts, values = make(weight)
    pack(other, parts)
    change_config(other, quantization_config=declared)
    found = verified(other, source)
    assert (found["differences"], found["uncompared"]) == ([], [])
    (decoded,) = [tensor for tensor in found["tensors"] if tensor["differing"] is None]
    assert (decoded["name"], decoded["elements"]) == (f"{UP}.weight", 48 * 32)
    assert decoded["max_abs"] == pytest.approx(float((values.double() - weight.double()).abs().max()), rel=1e-6)
    assert 0 < decoded["max_abs"] < float(weight.abs().max()) / 2


def test_verify_does_not_decode_scales_in_tensor_core_order(
    make_llama: Callable[..., Path], verified: Callable[..., dict[str, Any]]
) -> None:
    source, other = make_llama(), make_llama("other")
    codes, scales = torch.ones(48, 32).to(torch.float8_e4m3fn), torch.ones(48, 1).to(torch.float8_e8m0fnu)
    pack(other, {"_weight_qdata": codes, "_weight_scale": scales})
    assert [each["name"] for each in verified(other, source)["uncompared"]] == [f"{UP}.weight"]


def test_verify_accepts_a_tied_weight_stored_once_or_twice(
    make_llama: Callable[..., Path], verified: Callable[..., dict[str, Any]]
) -> None:
    once, twice = make_llama(), make_llama("twice")
    change_tensors(
        twice, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    assert verified(twice, once)["same"]
    assert verified(once, twice)["same"]
    change_tensors(twice, lambda tensors: tensors["lm_head.weight"].mul_(2))
    found = verified(once, twice)
    assert found["differences"] == [{"name": "lm_head.weight", "what": "is in the source alone"}]


def test_verify_decodes_gguf_blocks(tmp_path: Path, verified: Callable[..., dict[str, Any]]) -> None:
    import gguf

    values = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(values, kind)
    write_gguf(tmp_path / "f32.gguf", {"norm": values[0], "output.weight": values})
    write_gguf(tmp_path / "q8_0.gguf", {"norm": values[0], "output.weight": (blocks, kind)})
    found = verified(tmp_path / "q8_0.gguf", tmp_path / "f32.gguf")
    assert not found["same"]
    decoded = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert decoded["norm"]["differing"] == 0
    assert (decoded["output.weight"]["dtype"], decoded["output.weight"]["differing"]) == ("gguf:q8_0", None)
    off = np.abs(gguf.quants.dequantize(blocks, kind).astype(np.float64) - values.astype(np.float64))
    assert decoded["output.weight"]["max_abs"] == off.max()
    assert verified(tmp_path / "q8_0.gguf", tmp_path / "q8_0.gguf")["same"]


def test_verify_compares_a_pickle_with_a_module_of_user_code(
    tmp_path: Path, verified: Callable[..., dict[str, Any]]
) -> None:
    from tests.engine.models.tinynet import TinyNet

    state = {name: tensor.half() for name, tensor in TinyNet().state_dict().items()}
    torch.save(state, tmp_path / "net.pth")
    found = verified(tmp_path / "net.pth", f"{TINYNET}:TinyNet")
    assert found["same"]
    assert {(tensor["source_dtype"], tensor["dtype"]) for tensor in found["tensors"]} == {("float32", "float16")}


def test_verify_refuses_invalid_arguments_in_one_line(
    make_llama: Callable[..., Path], tmp_path: Path, capsys: Any
) -> None:
    source = make_llama()
    save_file({"x.weight": torch.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"\x00")
    cases = {
        "x.safetensors": "no tensor's name in common, so there is nothing to compare; the first names are x.weight and ",
        "cut.safetensors": "cut.safetensors",
        "nowhere": "there is no folder",
        "x.safetensors --drift": "is no export of this program: --drift is only for these",
        "x.safetensors --workers 2": "is no export of this program: --workers is only for these",
    }
    capsys.readouterr()
    for given, said in cases.items():
        name, *more = given.split()
        assert run(cli, "dtype-engine", ["verify", str(tmp_path / name), "--against", str(source), *more]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_verify_refuses_to_compare_gguf_names_with_names_of_transformers(
    make_llama: Callable[..., Path], tmp_path: Path, capsys: Any
) -> None:
    named = str(write_gguf(tmp_path / "x.gguf", {"token_embd.weight": np.ones((4, 32), np.float32)}))
    source = str(make_llama())
    capsys.readouterr()
    for one, other in ((named, source), (source, named)):
        assert run(cli, "dtype-engine", ["verify", one, "--against", other]) == 2
        error = capsys.readouterr().err
        assert "in common: GGUF has llama.cpp's names, which are not mapped to those of transformers yet" in error
        assert "token_embd.weight" in error
        assert error.count("\n") == 1
