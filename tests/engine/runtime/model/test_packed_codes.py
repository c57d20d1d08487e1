"""Codes of weights that other programs quantized are never taken as values: no cast changes them, and a pass is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.file_edits import Tensors, change_config, change_tensors

from dtype_engine.cli import cli
from dtype_engine.cli.program import run

LAYER = "model.layers.0.mlp.up_proj"
IN, OUT = 32, 64


@pytest.fixture
def quantised(make_llama: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that writes a Llama whose up projection is stored in the parts that `parts` makes of it."""

    def make(parts: Callable[[torch.Tensor], Tensors], method: dict[str, Any] | None) -> Path:
        folder = make_llama(intermediate_size=OUT, num_hidden_layers=1)

        def pack(tensors: Tensors) -> None:
            made = parts(tensors.pop(f"{LAYER}.weight") * 50)
            tensors.update({f"{LAYER}.{name}": part for name, part in made.items()})

        return change_config(change_tensors(folder, pack), **({"quantization_config": method} if method else {}))

    return make


def _mlx(weight: torch.Tensor) -> Tensors:
    words = torch.randint(0, 2**31, (OUT, IN * 4 // 32), dtype=torch.int64).to(torch.uint32)
    return {"weight": words, "scales": torch.rand(OUT, 1)}  # the biases are not there


MLX = {"bits": 4, "group_size": 32}
CASES: dict[str, tuple[Callable[[torch.Tensor], Tensors], dict[str, Any] | None, str]] = {
    "MLX": (_mlx, MLX, "packed by MLX"),
    "quanto": (lambda weight: {"weight._data": weight.char()}, None, "optimum-quanto"),  # the scale is not there
    "unknown": (lambda weight: {"weight": weight.char(), "row_scale": torch.rand(OUT)}, None, "row_scale"),
    "integers": (
        lambda weight: {"weight": weight.char()},
        None,
        "holds int8, where LlamaForCausalLM has floating-point values",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_undecodable_codes_are_exported_uncast_and_not_run(
    case: str, quantised: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, method, words = CASES[case]
    folder = quantised(parts, method)
    assert run(cli, "dtype-engine", ["drift", str(folder), "--cast", "*=bf16"]) == 2
    refusal = capsys.readouterr().err
    assert LAYER in refusal
    assert words in refusal
    assert "no forward pass" in refusal
    out = ["-o", str(tmp_path / "out"), "--incomplete"]
    assert run(cli, "dtype-engine", ["export", str(folder), "--cast", "*=bf16", *out]) == 0
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    kept = [name for name in before if name.startswith(LAYER)]
    assert before.keys() == after.keys()
    assert kept
    for name in kept:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(*(held[name].reshape(-1).view(torch.uint8) for held in (after, before)))
    assert after["model.norm.weight"].dtype == torch.bfloat16


def test_rule_that_matches_only_undecodable_codes_is_refused_with_the_reason(
    quantised: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = quantised(_mlx, MLX)
    for command in ("weights", "inspect"):
        assert run(cli, "dtype-engine", [command, str(folder), "--cast", f"{LAYER}=bf16"]) == 2
        assert f"{LAYER}." in (said := capsys.readouterr().err)
        assert "packed by MLX" in said
        assert "matches only tensors that it does not cast" in said


def test_unpaired_scales_and_weights_are_refused_by_name(
    quantised: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    declared = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    orphan = quantised(lambda weight: {"weight": weight, "weight_scale_inv": torch.rand(2, 1)}, declared)
    assert run(cli, "dtype-engine", ["drift", str(orphan)]) == 2
    assert f"{LAYER}.weight_scale_inv has no weight to scale" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            lambda weight: {"weight": weight, "weight_scale_inv": torch.rand(2, 1)},
            "weight_scale_inv belongs to {}.weight",
        ),
        (
            lambda weight: {"weight": weight.to(torch.float8_e4m3fn)},
            "weight holds float8_e4m3fn codes and has no {}.weight_scale_inv",
        ),
    ],
    ids=["orphan", "missing"],
)
def test_drift_and_export_refuse_a_quantized_weight_without_a_part(
    parts: Callable[[torch.Tensor], Tensors],
    said: str,
    quantised: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    declared = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    folder, other = quantised(parts, declared), "model.layers.0.mlp.gate_proj"

    def scale(tensors: Tensors) -> None:
        tensors[f"{other}.weight"] = tensors[f"{other}.weight"].to(torch.float8_e4m3fn)
        tensors[f"{other}.weight_scale_inv"] = torch.rand(2, 1)

    change_tensors(folder, scale)
    said = f"{LAYER}.{said.format(LAYER)}"
    assert run(cli, "dtype-engine", ["inspect", str(folder)]) == 0
    assert said in capsys.readouterr().out.splitlines()[0]
    assert run(cli, "dtype-engine", ["drift", str(folder)]) == 2
    assert f"{LAYER}.weight" in capsys.readouterr().err
    out = ["-o", str(tmp_path / "out")]
    assert run(cli, "dtype-engine", ["export", str(folder), *out]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run(cli, "dtype-engine", ["export", str(folder), *out, "--incomplete"]) == 0
    assert said in capsys.readouterr().err
