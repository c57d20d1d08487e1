"""`dtype-engine memory`, on the demo and on folders of which only headers can be read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.mixtures import make_mixture
from tests.helpers.paths import TINYNET

from dtype_engine.cli import cli
from dtype_engine.cli.program import run

# The demo: 6 layers, 2 heads of keys with 24 values each, float32, made for 1,024 tokens.
CACHE_OF_A_TOKEN = 6 * 2 * 2 * 24 * 4


def found(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    assert run(cli, "dtype-engine", ["memory", "--json", *arguments]) == status
    return json.loads(capsys.readouterr().out)


def test_serving_memory_is_the_sum_of_weights_and_kv_cache(capsys: pytest.CaptureFixture[str]) -> None:
    memory = found(capsys, "--activations", "none", "--context", "300", "--batch", "3", "--budget", "5MiB")
    assert memory["kv_bytes_per_token"] == CACHE_OF_A_TOKEN
    assert memory["kv_bytes"] == 3 * 300 * CACHE_OF_A_TOKEN
    assert memory["total_bytes"] == memory["weights_bytes"] + memory["kv_bytes"]
    assert memory["largest_context"] == ((5 << 20) - memory["weights_bytes"]) // (3 * CACHE_OF_A_TOKEN)
    assert memory["activations"] is None
    assert memory["fits"]
    assert memory["largest_context"] >= 300
    assert memory["most_sequences"] == ((5 << 20) - memory["weights_bytes"]) // (300 * CACHE_OF_A_TOKEN)


@pytest.mark.parametrize("kv", ["bf16", "int4@kivi", "fp8@token"])
def test_one_more_sequence_than_the_budget_has_room_for_exceeds_the_budget(
    capsys: pytest.CaptureFixture[str], kv: str
) -> None:
    def memory(batch: int, status: int = 0) -> Any:
        load = ("--context", "300", "--batch", str(batch), "--kv", kv)
        return found(capsys, "--activations", "none", "--budget", "5MiB", *load, status=status)

    most = memory(1)["most_sequences"]
    assert most > 1
    assert memory(most)["fits"]
    assert not memory(most + 1, status=1)["fits"]


def test_kv_cache_dtype_is_that_of_the_weights_or_of_the_kv_option(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--activations", "none", "--context", "100")
    assert found(capsys, *common, "--cast", "*=bf16")["kv_bytes"] == 100 * CACHE_OF_A_TOKEN // 2
    assert found(capsys, *common, "--kv", "fp8")["kv_bytes"] == 100 * CACHE_OF_A_TOKEN // 4
    # Values have 8 bits and a scale of 4 bytes for each token and head; keys have 16 bits but in layer 0.
    rules = ("--cast", "*.kv_cache.v=int8@token", "--cast", "*.0.*.kv_cache.k=f32")
    mixed = found(capsys, *common, *rules, "--kv", "bf16")
    assert mixed["kv_bytes"] == 100 * 2 * (6 * (24 + 4) + 5 * 24 * 2 + 24 * 4)
    assert mixed["kv_dtypes"] == ["bfloat16", "int8@token", "float32"]


def test_estimated_activation_memory_is_close_to_the_measured_memory(capsys: pytest.CaptureFixture[str]) -> None:
    estimate = found(capsys, "--context", "200")["activations"]
    measure = found(capsys, "--context", "200", "--activations", "measure")["activations"]
    assert measure["nbytes"] <= estimate["nbytes"] <= 1.05 * measure["nbytes"]
    assert (estimate["estimated"], measure["estimated"]) == (True, False)


def test_activation_memory_is_measured_under_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--context", "200", "--activations", "measure")
    wide, narrow = (
        found(capsys, *common, "--cast", cast)["activations"]["nbytes"] for cast in ("*.mlp=bf16", "*=bf16")
    )
    # Half, and a processor without bfloat16 products also has a widened copy of their arguments.
    assert 0.45 < narrow / wide < 0.7


def test_memory_command_exits_with_status_1_if_the_budget_is_exceeded(capsys: pytest.CaptureFixture[str]) -> None:
    assert found(capsys, "--activations", "none", "--budget", "1MiB", status=1)["largest_context"] == 0
    assert run(cli, "dtype-engine", ["memory", "--activations", "none", "--budget", "4MiB"]) == 1
    assert "fits 4.00 MiB up to " in capsys.readouterr().out


def test_memory_command_says_why_kv_caches_cannot_be_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    net = f"{TINYNET}:TinyNet"
    memory = found(capsys, net)
    assert "is code" in memory["notes"][-1]
    assert memory["kv_bytes"] == 0
    for wrong in (["--kv", "stored"], ["--kv", "what"], ["--context", "0"], ["--budget", "much"]):
        assert run(cli, "dtype-engine", ["memory", *wrong]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_least_time_of_a_token_is_its_bytes_divided_by_the_bandwidth(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_mixture("Mixtral").save_pretrained(tmp_path)
    common = (str(tmp_path), "--activations", "none", "--context", "100", "--batch", "3")
    reads = found(capsys, *common, "--bandwidth", "2GB/s")["decoding"]
    assert reads["cache_bytes"] == 100 * 2 * 2 * 16 * 4  # 2 layers, keys and values of one head with 16 values
    assert reads["milliseconds"] == pytest.approx(reads["active_bytes"] / 2e6)
    assert reads["milliseconds_with_cache"] == pytest.approx((reads["active_bytes"] + reads["cache_bytes"]) / 2e6)
    assert found(capsys, *common)["decoding"]["milliseconds"] is None
    assert run(cli, "dtype-engine", ["memory", *common, "--bandwidth", "h200"]) == 0
    assert "decoding at 4.8 TB/s: at least " in capsys.readouterr().out
    assert run(cli, "dtype-engine", ["memory", *common, "--bandwidth", "quick"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_memory_command_on_headers_does_not_import_torch() -> None:
    code = (
        "import sys; from dtype_engine.cli import cli; from dtype_engine.cli.program import run\n"
        "assert run(cli, 'x', ['memory', '--activations', 'none', '--budget', '8GiB']) == 0\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
