"""`verify` says yes to what an export wrote, and names every tensor that was changed since."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.helpers.paths import DEMO, TINYNET

import dtype_engine as de
from dtype_engine.checkpoint.source import locate
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.runtime.session.verify import verify

CASTS = ("*.mlp=fp8", "*.o_proj=int8@tensor", "*norm*=float32", "*.q_proj=float16", "*.v_proj=e5m2")


@pytest.fixture
def exported(make_llama: Any, tmp_path: Path) -> tuple[Path, Path]:
    """A source and its export in five dtypes."""
    source = make_llama(dtype="bfloat16")
    arguments = [part for cast in CASTS for part in ("--cast", cast)]
    assert run(cli, "dtype-engine", ["export", str(source), *arguments, "-o", str(tmp_path / "out")]) == 0
    return source, tmp_path / "out"


def change(folder: Path, name: str, make: Any) -> None:
    """Replace one tensor of an export by what `make` returns. If it returns None, the tensor is left out."""
    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    made = make(tensors.pop(name, torch.empty(0)).clone())
    if made is not None:
        tensors[name] = made
    save_file(tensors, file, metadata)


def test_verify_confirms_the_recipe_and_drift_of_an_export(exported: tuple[Path, Path]) -> None:
    source, out = exported
    report = verify(out, locate(str(source)), drift=True)
    assert report.same
    assert report.differences == ()
    with safe_open(source / "model.safetensors", framework="pt") as opened:
        assert report.tensors == len(opened.keys())
    assert report.drift_before is not None
    assert report.drift_before.max_abs > 1e-4
    assert report.drift_after == report.drift_before
    session = de.open(str(source))
    for cast in CASTS:
        session.cast(*cast.rsplit("=", 1))
    assert session.drift().output == report.drift_before


def bit_flipped(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1).view(torch.uint8)[0] ^= 1
    return tensor


@pytest.mark.parametrize(
    ("name", "make", "says"),
    [
        ("model.norm.weight", bit_flipped, "1 of 32 values of model.norm.weight differ"),
        ("model.layers.0.mlp.up_proj.weight", bit_flipped, "1 of 1536 values"),
        ("model.layers.0.mlp.up_proj.weight_scale", bit_flipped, "weight_scale differ"),
        ("model.layers.1.self_attn.q_proj.weight", lambda tensor: tensor.bfloat16(), "is bfloat16 [32, 32] and should"),
        ("model.layers.1.self_attn.k_proj.weight", lambda tensor: tensor[:, :-1].contiguous(), "and should be"),
        ("model.embed_tokens.weight", lambda tensor: None, "is missing"),
    ],
)
def test_verify_names_a_single_changed_tensor(
    exported: tuple[Path, Path], name: str, make: Any, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = exported
    change(out, name, make)
    capsys.readouterr()
    assert run(cli, "dtype-engine", ["verify", str(out), "--against", str(source), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [found["name"] for found in report["differences"]] == [name.removesuffix("_scale")]
    assert says in report["differences"][0]["what"]
    assert report["same"] is False


def test_verify_finds_that_an_export_has_another_source_or_recipe(
    exported: tuple[Path, Path], make_llama: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = exported
    other = make_llama("other", dtype="bfloat16", initializer_range=0.03)
    assert run(cli, "dtype-engine", ["verify", str(out), "--against", str(other)]) == 1
    assert "not the same" in capsys.readouterr().out
    written = out / "recipe.yaml"
    written.write_text(written.read_text().replace("float16", "bfloat16"))
    assert run(cli, "dtype-engine", ["verify", str(out), "--against", str(source)]) == 1
    assert "is float16 [32, 32] and should be bfloat16" in capsys.readouterr().out


def test_verify_reports_an_extra_tensor(exported: tuple[Path, Path]) -> None:
    source, out = exported
    change(out, "extra.weight", lambda _: torch.zeros(2))
    report = verify(out, locate(str(source)))
    assert [(found.name, found.what) for found in report.differences] == [("extra.weight", "is not in the source")]


def test_verify_reports_a_tensor_in_two_files(exported: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Loaders differ in which of the two they read."""
    source, out = exported
    shutil.copy(out / "model.safetensors", out / "model-00001-of-00001.safetensors")
    assert run(cli, "dtype-engine", ["verify", str(out), "--against", str(source)]) == 1
    assert "is in model-00001-of-00001.safetensors and again in model.safetensors" in capsys.readouterr().out


def test_verify_checks_an_export_of_user_code_with_its_drift(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = f"{TINYNET}:TinyNet", tmp_path / "out"
    export = ["export", model, "--cast", "linear_*=fp8", "--cast", "head=f16", "-o", str(out)]
    assert run(cli, "dtype-engine", export) == 0
    assert run(cli, "dtype-engine", ["verify", str(out), "--against", model, "--drift"]) == 0
    assert "the same, bit for bit" in capsys.readouterr().out
    change(out, "head.bias", bit_flipped)
    assert run(cli, "dtype-engine", ["verify", str(out), "--against", model]) == 1


def test_verify_refuses_a_missing_folder(make_llama: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_llama()
    assert run(cli, "dtype-engine", ["verify", str(tmp_path / "none"), "--against", str(source)]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_verify_measures_drift_with_the_given_prompts_and_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The drift is of the prompts and the settings given, as `drift` measures it."""
    run_so = ["--prompt", "def f(x):", "--prompt", "import os", "--float-inputs", "model", "--compute", "bf16"]
    demo = str(DEMO)
    assert run(cli, "dtype-engine", ["export", demo, "--preset", "fp8-linears", "-o", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    arguments = ["verify", str(tmp_path / "out"), "--against", demo, "--drift", "--json", *run_so]
    assert run(cli, "dtype-engine", arguments) == 0
    verified = json.loads(capsys.readouterr().out)
    assert verified["same"]
    arguments = ["drift", demo, "--preset", "fp8-linears", "--json", "--device", "cpu", *run_so]
    assert run(cli, "dtype-engine", arguments) == 0
    drift = json.loads(capsys.readouterr().out)
    assert verified["rules"] == drift["rules"]
    assert verified["drift_after"] == verified["drift_before"] == drift["output"]
