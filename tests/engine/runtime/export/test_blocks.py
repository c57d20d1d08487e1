"""Exports in formats with blocks: what is in the files, who loads it back, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.helpers import formats
from tests.helpers.exporting import export_checkpoint, read

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.source import locate
from dtype_engine.core.errors import UserError
from dtype_engine.runtime.session.verify import verify

LAYOUTS = {
    "mxfp8": ("mxfp8-quantized", {"weight": "F8_E4M3", "weight_scale": "U8"}),
    "mxfp4": ("mxfp4-pack-quantized", {"weight_packed": "U8", "weight_scale": "U8"}),
    "mxfp4:floor": ("mxfp4-pack-quantized", {"weight_packed": "U8", "weight_scale": "U8"}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"weight_packed": "U8", "weight_scale": "F8_E4M3", "weight_global_scale": "F32"},
    ),
    "fp8@128x128": ("float-quantized", {"weight": "F8_E4M3", "weight_scale": "F32"}),
    "int4@g128": ("pack-quantized", {"weight_packed": "I32", "weight_scale": "BF16", "weight_shape": "I64"}),
    "int4@g128a": (
        "pack-quantized",
        {"weight_packed": "I32", "weight_scale": "BF16", "weight_shape": "I64", "weight_zero_point": "I32"},
    ),
    "int8@g128": ("pack-quantized", {"weight_packed": "I32", "weight_scale": "BF16", "weight_shape": "I64"}),
}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "tie_word_embeddings": False}


def recipe(*casts: str) -> Recipe:
    return Recipe(tuple(map(Rule.parse, casts)))


@pytest.fixture
def tensors(tmp_path: Path) -> Path:
    """Return weights of many shapes. Some are not divisible by any block."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (130, 200), "b.weight": (64, 256), "c.bias": (9,), "d.experts": (3, 40, 64), "e": (5, 33)}
    source = tmp_path / "source"
    source.mkdir()
    save_file(
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}, source / "x.safetensors"
    )
    return source


@pytest.mark.parametrize("dtype", [name for name in formats.BLOCKS if not name.startswith("mxfp6")])
def test_block_format_export_is_verified_opened_and_exported_again(dtype: str, tensors: Path, tmp_path: Path) -> None:
    """Each step has its own code: verify computes codes and scales without the code that export uses."""
    one, two = tmp_path / "one", tmp_path / "two"
    report = export_checkpoint(open_checkpoint(tensors), "source", recipe(f"*={dtype}"), one)
    assert verify(one, locate(str(tensors))).differences == ()
    opened = open_checkpoint(one)
    assert {opened.dtype(name) for name in opened.weights} == {dtype}
    assert opened.tree().stored_bytes == report.nbytes
    assert report.nbytes == sum(tensor.nbytes for tensor in load_file(one / "model.safetensors").values())
    assert {name: tensor.shape for name, tensor in opened.weights.items()} == {
        name: tuple(tensor.shape) for name, tensor in load_file(tensors / "x.safetensors").items()
    }
    export_checkpoint(opened, "one", recipe(), two)
    assert verify(two, locate(str(one))).differences == ()
    before, after = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)


def written_as(tensors: Path, pattern: str, out: Path) -> tuple[Path, dict[str, torch.Tensor], dict[str, str]]:
    """The file of an export, with its tensors and metadata as safetensors reads them."""
    export_checkpoint(open_checkpoint(tensors), "source", recipe(pattern), out)
    file = out / "model.safetensors"
    return file, *read(file)


def test_verify_finds_one_wrong_code_or_scale(tensors: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    file, written, metadata = written_as(tensors, "*=nvfp4", out)
    for name in ("b.weight_quantized_packed", "b.weight_scale", "b.weight_global_scale"):
        changed = {other: tensor.clone() for other, tensor in written.items()}
        changed[name].view(torch.uint8).view(-1)[0] ^= 1
        save_file(changed, file, metadata)
        (difference,) = verify(out, locate(str(tensors))).differences
        assert difference.name == "b.weight"
        assert f"1 of {written[name].numel()} values of {name} differ" in difference.what


@pytest.mark.parametrize("dtype", LAYOUTS)
def test_block_format_exports_loaded_by_transformers_give_the_measured_output(
    dtype: str, make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", "0.20")
    import transformers

    source, out = make_llama(dtype="bfloat16", **WIDE), tmp_path / "out"
    session = de.open(str(source))
    session.cast("type:Linear", dtype)
    session.cast("lm_head", "stored")
    assert session.export(out).nbytes == session.plan.planned_bytes
    layout, names = LAYOUTS[dtype]
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    assert described["format"] == layout
    with safe_open(out / "model.safetensors", framework="pt") as opened:
        module = "model.layers.0.mlp.down_proj."
        kept = {
            name.removeprefix(module): opened.get_slice(name).get_dtype()
            for name in list(opened.keys())
            if module in name
        }
    assert kept == names
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.LlamaForCausalLM.from_pretrained(out, quantization_config=settings)
    ours = de.load_pretrained(out)
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, ours(ids).logits)
    opened_again = de.open(str(out))
    assert {name: info.dtype for name, info in opened_again.tree.tensors.items()} == dict(session.plan.dtypes)
    buffers = (
        opened_again.model.resident_bytes - opened_again.plan.stored_bytes
    )  # the codes stay packed, as in the file
    assert 0 < buffers < 1000


def test_fp8_128x128_ue8m0_export_has_the_deepseek_layout(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    source, out = make_llama(dtype="bfloat16", **WIDE), tmp_path / "out"
    export_checkpoint(open_checkpoint(source), "source", recipe("*.mlp=fp8@128x128:ue8m0"), out)
    described: dict[str, Any] = json.loads((out / "config.json").read_text())["quantization_config"]
    assert described["quant_method"] == "fp8"
    assert (described["weight_block_size"], described["scale_fmt"]) == ([128, 128], "ue8m0")
    assert "model.layers.0.self_attn.q_proj" in described["modules_to_not_convert"]
    assert "lm_head" in described["modules_to_not_convert"]
    with safe_open(out / "model.safetensors", framework="pt") as opened:
        name = "model.layers.0.mlp.up_proj.weight"
        assert opened.get_slice(name).get_dtype() == "F8_E4M3"
        assert opened.get_slice(f"{name}_scale_inv").get_dtype() == "F8_E8M0"
        assert opened.get_slice(f"{name}_scale_inv").get_shape() == [2, 1]


def test_export_refuses_formats_without_a_checkpoint_layout(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    source = open_checkpoint(make_llama(dtype="bfloat16", **WIDE))
    with pytest.raises(UserError, match="no layout of a checkpoint has it"):
        export_checkpoint(source, "source", recipe("*.mlp=mxfp6_e2m3"), tmp_path / "out")
    with pytest.raises(UserError, match="can't be exported together"):
        export_checkpoint(source, "source", recipe("*.mlp=fp8@128x128:ue8m0", "*.q_proj=nvfp4"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensor_declared_as_codes_of_two_weights_is_refused(tensors: Path, tmp_path: Path) -> None:
    """A weight's name may end like that of another one's codes; one tensor would then be read for both."""
    out = tmp_path / "out"
    file, written, metadata = written_as(tensors, "*=int8", out)
    codes = next(name for name in written if name.endswith("_quantized"))
    name = codes.removesuffix("_quantized")
    save_file(
        written | {f"{codes}_scale": written[f"{name}_scale"].clone()},
        file,
        metadata | {f"dtype_engine.scaled.{codes}": "int8"},
    )
    with pytest.raises(UserError, match=f"tensor {codes} is a part of two weights, "):
        open_checkpoint(out).tree()


def test_shape_in_metadata_that_contradicts_the_codes_is_refused(tensors: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    file, written, metadata = written_as(tensors, "*=mxfp4", out)
    for shape in ("64,254", "64", "", "-1,256", "999999999999999,999999999999999", "0,0", "1,2,3,x"):
        save_file(written, file, metadata | {"dtype_engine.shape.b.weight": shape})
        with pytest.raises(UserError, match="are not those of a weight in mxfp4"):
            open_checkpoint(out).tree()
