"""The tokens of each expert, against hooks on the routers of the same model in plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import architectures
from tests.helpers.mixtures import make_mixture

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run

COUNTS = {
    "Mixtral": 4, "OLMoE": 8, "Qwen2-MoE": 6, "DeepSeek-V3": 8, "gpt-oss": 4, "Granite-MoE": 5, "HunYuan": 4, "GLM-4.5": 4,
}  # fmt: skip


def by_hooks(model: Any, batches: list[torch.Tensor], experts: int) -> dict[str, tuple[int, ...]]:
    """The tokens that each router sent to each expert, by the name of the module that holds the router."""
    counts: dict[str, torch.Tensor] = {}

    def count(name: str, output: Any) -> None:
        for chosen in output if isinstance(output, tuple) else (output,):
            if isinstance(chosen, torch.Tensor) and not chosen.is_floating_point():
                found = torch.bincount(chosen.reshape(-1), minlength=experts)
                counts[name] = counts.get(name, torch.zeros(experts, dtype=torch.int64)) + found

    for name, module in model.named_modules():
        if name.endswith((".gate", ".router")):
            module.register_forward_hook(lambda module, args, output, name=name: count(name.rpartition(".")[0], output))
    with torch.no_grad():
        for ids in batches:
            model(input_ids=ids)
    return {name: tuple(found.tolist()) for name, found in counts.items()}


@pytest.mark.parametrize("name", COUNTS)
def test_tokens_of_experts_are_those_that_the_routers_chose(name: str, tmp_path: Path) -> None:
    make_mixture(name).save_pretrained(tmp_path)
    batches = [architectures.tokens(length) for length in (24, 7)]
    expected = by_hooks(make_mixture(name), batches, COUNTS[name])
    session = de.open(str(tmp_path), inputs=[{"input_ids": ids} for ids in batches])
    found, notices = session.expert_tokens()
    assert notices == ()
    assert expected
    assert {each.module.removesuffix(".experts"): each.tokens for each in found} == expected


def test_tokens_of_experts_that_all_get_every_token_are_not_counted() -> None:
    session = de.open(make_mixture("Llama 4"), inputs={"input_ids": architectures.tokens()})
    found, notices = session.expert_tokens()
    assert found == ()
    assert "does not run each expert with its own tokens" in notices[0]


def test_scan_and_search_name_experts_with_too_few_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_mixture("Mixtral")
    model.save_pretrained(tmp_path)
    ids = architectures.tokens(28)
    np.savez(tmp_path / "ids.npz", input_ids=ids.numpy())
    expected = by_hooks(model, [ids], 4)
    few = [index for index, count in enumerate(expected["model.layers.0.mlp"]) if count < 16]
    assert 0 < len(few) < 4
    scan = (
        "--dtypes",
        "bf16",
        "--draws",
        "1",
        "--inputs",
        str(tmp_path / "ids.npz"),
        "--save",
        str(tmp_path / "scan.json"),
    )
    assert run(cli, "dtype-engine", ["scan", str(tmp_path), *scan, "--json"]) == 0
    told = capsys.readouterr()
    for each in json.loads(told.out)["experts"]:
        assert tuple(each["tokens"]) == expected[each["module"].removesuffix(".experts")]
    words = f"got fewer than 16 tokens of the inputs: {', '.join(map(str, few))} of model.layers.0.mlp.experts"
    assert words in told.err
    assert run(cli, "dtype-engine", ["search", str(tmp_path), *scan, "--budget", "90%"]) == 0
    assert words in capsys.readouterr().err
    assert run(cli, "dtype-engine", ["scan", str(tmp_path), *scan]) == 0
    fewest = f"{min(expected['model.layers.0.mlp']):,}"
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("model.layers.0.mlp.experts "))
    assert fewest in row.split()
