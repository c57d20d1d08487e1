"""What checkpoint files say about their quantization. The files are written here as the quantizing programs write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.helpers.gguf_files import gguf_file

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.provenance import Provenance, provenance
from dtype_engine.cli import cli
from dtype_engine.cli.program import run

GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": False, "checkpoint_format": "gptq_v2",
    "dataset": "wikitext2", "meta": {"quantizer": ["gptqmodel:7.7.0"], "mse": 2.4},
}  # fmt: skip
COMPRESSED = {
    "quant_method": "compressed-tensors", "version": "0.12.2", "format": "mixed-precision", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True,
                                "group_size": None, "observer": "minmax"}},
        "group_1": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 128,
                                "observer": "mse"}},
    },
}  # fmt: skip
MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "*.router"]},
}
TORCHAO = {
    "quant_method": "torchao", "modules_to_not_convert": ["lm_head"],
    "quant_type": {"default": {"_type": "IntxWeightOnlyConfig", "_data": {
        "granularity": {"_type": "PerGroup", "_data": {"group_size": 32}},
        "mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"},
        "weight_dtype": {"_type": "torch.dtype", "_data": "int4"},
    }}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"quantization_config": GPTQ},
            (
                "gptq gptq_v2; 4-bit, groups of 128, asymmetric, activation order; scales by error power 2.4; "
                "calibrated with wikitext2",
                "written by gptqmodel 7.7.0",
            ),
        ),
        (
            {"quantization_config": COMPRESSED},
            (
                "compressed-tensors mixed-precision; 8-bit float, a scale for each channel, symmetric; "
                "4-bit int, groups of 128, symmetric; scales by minmax, mse",
                "written by compressed-tensors 0.12.2; not quantized: lm_head",
            ),
        ),
        (
            {"quantization_config": TORCHAO},
            ("torchao IntxWeightOnlyConfig; int4, groups of 32, symmetric", "not quantized: lm_head"),
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}},
            ("fp8; e4m3, blocks of 128 x 128",),
        ),
        (
            {"quantization": {"group_size": 64, "bits": 4, "mode": "affine", "lm_head": {"bits": 6, "group_size": 64}}},
            ("mlx affine; 4-bit, groups of 64; 6-bit, groups of 64",),
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "auto-round", "bits": 2, "group_size": 32, "sym": True, "data_type": "int", "iters": 200,
                    "nsamples": 128, "seqlen": 2048, "dataset": "pile-10k", "autoround_version": "0.16.1",
                }
            },
            (
                "auto-round; 2-bit int, groups of 32, symmetric; scales by 200 steps of tuning; "
                "calibrated with pile-10k, 128 samples of 2048 tokens",
                "written by auto-round 0.16.1",
            ),
        ),
        ({"model_type": "llama"}, ()),
        ({"quantization_config": "gptq"}, ()),
        ({"quantization_config": {"quant_method": ["x"], "bits": "4", "config_groups": [1], "ignore": {"a": 1}}}, ()),
    ],
)  # fmt: skip
def test_provenance_is_read_from_the_config(tmp_path: Path, config: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert provenance(tmp_path, config, {}).lines() == expected


def test_provenance_is_read_from_files_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    found = provenance(tmp_path, {}, {})
    assert (found.method, found.producer) == ("NVFP4", "modelopt 0.47.0")
    assert found.codes == ("groups of 16",)
    assert found.ignored == ("lm_head", "*.router")


def test_provenance_names_the_modifiers_of_an_llm_compressor_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "default_stage:\n  default_modifiers:\n    GPTQModifier:\n      ignore: [lm_head]\n      scheme: W4A16\n"
    )
    found = provenance(tmp_path, {"quantization_config": COMPRESSED}, {})
    assert found.method == "compressed-tensors mixed-precision (GPTQModifier W4A16)"


@pytest.mark.parametrize("content", ["a: [", "- 1", "\x00", "a: {b: {c: 3}}", "a: 5"])
def test_unreadable_recipe_gives_no_provenance(tmp_path: Path, content: str) -> None:
    (tmp_path / "recipe.yaml").write_text(content)
    assert not provenance(tmp_path, {}, {})


def test_oversized_recipe_is_said_not_to_be_read(tmp_path: Path) -> None:
    """YAML is slow to read: 0.6 MB of such lines took 5 s."""
    lines = (f"k{number}: {{m: {{n: {{scheme: y}}}}}}\n" for number in range(20_000))
    (tmp_path / "recipe.yaml").write_text("".join(lines))
    found = provenance(tmp_path, {"quantization_config": COMPRESSED}, {})
    assert found.method is not None
    assert found.method.endswith(" (recipe.yaml of 575.09 KiB is not read: at most 64.00 KiB are)")


def test_oversized_recipe_of_an_export_gives_no_provenance(tmp_path: Path) -> None:
    rules = "  - {pattern: model.layers.0.mlp.experts.0.down_proj, dtype: bfloat16}\n" * 2000
    (tmp_path / "recipe.yaml").write_text(f"version: 1\nrules:\n{rules}")
    assert not provenance(tmp_path, {}, {})


def test_gguf_provenance_names_the_file_type_and_importance_matrix(tmp_path: Path) -> None:
    with gguf_file(tmp_path / "x.gguf", "llama") as writer:
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
        writer.add_string("general.quantized_by", "a person\x1b[31m")
        writer.add_string("quantize.imatrix.file", "/data/imatrix.dat")
        writer.add_string("quantize.imatrix.dataset", "calibration_v3.txt")
        writer.add_int32("quantize.imatrix.chunks_count", 125)
        writer.add_string("general.description", "x" * 100_000)
        writer.add_tensor("output.weight", np.zeros((2, 32), np.float32))
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    assert checkpoint.provenance.lines() == (
        "GGUF Q4_K_M; calibrated with an importance matrix of 125 chunks of calibration_v3.txt",
        "written by a person\\x1b[31m",
    )
    assert "general.description" not in checkpoint.metadata  # too long to describe anything


def test_inspect_shows_the_provenance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"x.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": GPTQ}))
    assert run(cli, "dtype-engine", ["inspect", str(tmp_path)]) == 0
    assert "gptq gptq_v2; 4-bit, groups of 128" in capsys.readouterr().out
    assert run(cli, "dtype-engine", ["inspect", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["provenance"]
    assert shown["producer"] == "gptqmodel 7.7.0"
    assert shown["calibration"] == "wikitext2"


def test_empty_provenance_has_no_lines_of_text() -> None:
    assert Provenance().lines() == ()
    assert not Provenance()
