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
from tests.helpers.paths import TINYNET

from dtype_engine.cli import cli
from dtype_engine.cli.program import run

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture
def verified(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs `verify OTHER --against SOURCE --json`; the object, whose `same` is what the exit status says."""

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


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_saved_by_transformers_is_an_exact_cast(
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


def test_what_is_no_cast_is_named_with_its_distance(
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

    changed(other, spoil)
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


def test_weights_that_are_not_decoded_are_named(
    make_llama: Callable[..., Path], tmp_path: Path, verified: Callable[..., dict[str, Any]]
) -> None:
    source, other = make_llama(), make_llama("other")

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{UP}.weight"]
        tensors[f"{UP}.qweight"] = torch.ones(4, 48, dtype=torch.int32)
        tensors[f"{UP}.qzeros"] = torch.ones(1, 6, dtype=torch.int32)
        tensors[f"{UP}.scales"] = torch.ones(1, 48, dtype=torch.float16)

    changed(other, pack)
    (other / "recipe.yaml").write_text("quant_stage:\n  quant_modifiers: {}\n")  # as other programs leave one
    for one, against, where in ((other, source, ""), (source, other, " in the source")):
        found = verified(one, against)
        assert found["uncompared"] == [{"name": f"{UP}.weight", "what": f"is packed by GPTQ or AWQ{where}"}]
        assert found["differences"] == []
        assert {tensor["differing"] for tensor in found["tensors"]} == {0}
    found = verified(other, other)
    assert found["same"], "equal codes need no decoding"
    assert len(found["tensors"]) == 22


def test_a_tied_weight_may_be_stored_once_or_twice(
    make_llama: Callable[..., Path], verified: Callable[..., dict[str, Any]]
) -> None:
    once, twice = make_llama(), make_llama("twice")
    changed(twice, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert verified(twice, once)["same"]
    assert verified(once, twice)["same"]
    changed(twice, lambda tensors: tensors["lm_head.weight"].mul_(2))
    found = verified(once, twice)
    assert found["differences"] == [{"name": "lm_head.weight", "what": "is in the source alone"}]


def test_blocks_of_gguf_are_decoded(tmp_path: Path, verified: Callable[..., dict[str, Any]]) -> None:
    import gguf

    values = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(values, kind)
    for name in ("f32", "q8_0"):
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "llama")
        writer.add_tensor("norm", values[0])
        raw = {"raw_dtype": kind} if name == "q8_0" else {}
        writer.add_tensor("output.weight", blocks if raw else values, **raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    found = verified(tmp_path / "q8_0.gguf", tmp_path / "f32.gguf")
    assert not found["same"]
    decoded = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert decoded["norm"]["differing"] == 0
    assert (decoded["output.weight"]["dtype"], decoded["output.weight"]["differing"]) == ("q8_0", None)
    off = np.abs(gguf.quants.dequantize(blocks, kind).astype(np.float64) - values.astype(np.float64))
    assert decoded["output.weight"]["max_abs"] == off.max()
    assert verified(tmp_path / "q8_0.gguf", tmp_path / "q8_0.gguf")["same"]


def test_a_file_of_pickles_against_code(tmp_path: Path, verified: Callable[..., dict[str, Any]]) -> None:
    from tests.engine.models.tinynet import TinyNet

    state = {name: tensor.half() for name, tensor in TinyNet().state_dict().items()}
    torch.save(state, tmp_path / "net.pth")
    found = verified(tmp_path / "net.pth", f"{TINYNET}:TinyNet")
    assert found["same"]
    assert {(tensor["source_dtype"], tensor["dtype"]) for tensor in found["tensors"]} == {("float32", "float16")}


def test_nonsense_is_one_line(make_llama: Callable[..., Path], tmp_path: Path, capsys: Any) -> None:
    source = make_llama()
    save_file({"x.weight": torch.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"\x00")
    cases = {
        ("x.safetensors",): "no tensor's name in common, so there is nothing to compare: the first are x.weight and ",
        ("cut.safetensors",): "cut.safetensors",
        ("nowhere",): "there is no folder",
        ("x.safetensors", "--drift"): "is no export of this program: --drift is only for these",
        ("x.safetensors", "--workers", "2"): "is no export of this program: --workers is only for these",
    }
    for (name, *more), said in cases.items():
        assert run(cli, "dtype-engine", ["verify", str(tmp_path / name), "--against", str(source), *more]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
