"""The floor against the reference run by hand in other ways; limits; the history."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess

import pytest
import torch
from tests.helpers import architectures, preloaded
from tests.helpers.paths import DEMO
from torch import nn

import dtype_engine as de
from dtype_engine.results.drift import OutputDrift
from dtype_engine.results.thresholds import Limit, verdicts
from dtype_engine.runtime.numerics.compare.metrics import OutputMetrics


def drift(*arguments: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run(preloaded.COMMAND, "drift", *arguments)


def test_noise_floor_equals_reordered_reference_runs() -> None:
    import transformers

    options = de.Options(prompts=("def main():\n    return 1", "import os\nimport sys\n"))
    session = de.open(options=options)
    assert session.inputs is not None
    found = session.floor()
    assert found.ways == ("eager attention", "batch of two")
    sdpa, eager = (
        transformers.AutoModelForCausalLM.from_pretrained(DEMO, attn_implementation=way) for way in ("sdpa", "eager")
    )
    outputs: list[OutputDrift] = []
    ways = (lambda ids: eager(ids).logits, lambda ids: sdpa(torch.cat([ids, ids])).logits[:1])
    with torch.no_grad():
        for way in ways:
            comparison = OutputMetrics(-1)
            for batch in session.inputs.batches:
                ids = batch.kwargs["input_ids"]
                comparison.add(sdpa(ids).logits, way(ids))
            outputs.append(comparison.result())
    assert found.sqnr_db == pytest.approx(min(output.sqnr_db for output in outputs), rel=1e-6)
    assert found.max_abs == pytest.approx(max(output.max_abs for output in outputs), rel=1e-6)
    assert found.kl_mean == pytest.approx(max(output.kl_mean or 0 for output in outputs), rel=1e-3, abs=1e-17)
    assert session.model.module.config._attn_implementation == "sdpa"


def test_noise_floor_is_measured_once_and_covers_smaller_drifts() -> None:
    session = de.open()
    floor = session.floor()
    assert session.floor() is floor
    session.cast("*", "bfloat16")
    assert not floor.covers(session.drift().output)
    session.cast("*", "float64")
    output = session.drift().output
    assert output.max_abs > 0
    assert floor.covers(dataclasses.replace(output, kl_mean=floor.kl_mean))
    session.cast("*", "float32")
    assert not floor.covers(session.drift().output)  # what is exact is no noise


@pytest.mark.parametrize("name", ["llama", "t5", "vit", "whisper", "mamba", "torch_lstm", "clip"])
def test_noise_floor_uses_only_reorderings_that_the_model_supports(name: str) -> None:
    module, inputs = architectures.make(name)
    session = de.open(module, inputs=inputs)
    before = session.drift().output
    floor = session.floor()
    assert set(floor.ways) <= {"eager attention", "sdpa attention", "batch of two"}
    assert floor.rel_l2 < 1e-3
    assert session.drift().output == before  # nothing of the other ways is left


def test_noise_floor_does_not_batch_a_model_whose_first_dimension_is_time() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.linear(x).cumsum(0))

    session = de.open(Sums(), inputs=(torch.ones(3, 4),))
    assert session.floor().ways == ()


def output(**figures: float) -> OutputDrift:
    values = {
        "elements": 10,
        "mean_abs": 0.1,
        "max_abs": 1.0,
        "rel_l2": 0.1,
        "sqnr_db": 30.0,
        "cosine": 0.99,
        "nonfinite": 0,
    }
    return OutputDrift(**{**values, **figures})  # type: ignore[arg-type]


class Whole(nn.Module):
    """Divides by a figure of the whole batch, so that its rows depend on how many there are."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.one, self.two, self.way = nn.Linear(8, 8), nn.Linear(8, 4), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        x = (
            x
            / {"norm": lambda: x.norm(), "sum": lambda: x.exp().sum(0), "rows": lambda: x.norm(dim=-1, keepdim=True)}[
                self.way
            ]()
        )
        result: torch.Tensor = self.two(x)
        return result


@pytest.mark.parametrize(("way", "ways"), [("norm", ()), ("sum", ()), ("rows", ("batch of two",))])
def test_noise_floor_does_not_batch_examples_that_affect_each_other(way: str, ways: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    session = de.open(Whole(way), inputs=(torch.randn(16, 8),))
    session.cast("*", "float16")
    assert session.floor().ways == ways
    assert not session.floor().covers(session.drift().output)


def test_drift_limits_are_met_or_missed() -> None:
    max_kl, min_sqnr = Limit("max_kl", "kl_mean", 1e-3), Limit("min_sqnr", "sqnr_db", 30.0)
    limits = max_kl, min_sqnr, Limit("min_top1", "top1_agreement", 0.99)
    found = verdicts(limits, output(kl_mean=1e-3, top1_agreement=0.98))
    assert [verdict.passed for verdict in found] == [True, True, False]
    assert str(found[2]) == "same top-1 98 %: under the limit, 99 %"
    assert str(found[0]) == "mean KL 0.001 nats: at most 0.001 nats"
    assert [verdict.passed for verdict in verdicts(limits, output(kl_mean=math.nan, sqnr_db=math.nan))] == [False] * 3
    (found,) = verdicts([min_sqnr], output(nonfinite=1))
    assert not found.passed
    assert "not finite" in str(found)
    assert not verdicts([min_sqnr], output(nonfinite_reference=3, sqnr_db=math.inf))[0].passed
    assert "this output has none" in str(verdicts([max_kl], output())[0])
    assert verdicts((), output()) == ()


def test_missed_limit_exits_with_status_1_and_the_reason() -> None:
    limits = ("--max-kl", "1e-6", "--min-top1", "50%", "--min-sqnr", "20")
    done = drift("--cast", "*=bf16", *limits, "--floor", "always", "--json", "--causes")
    assert done.returncode == 1
    assert done.stderr.count("missed") == 1
    found = json.loads(done.stdout)
    assert f"--max-kl is missed: mean KL {found['output']['kl_mean']:.6g} nats" in done.stderr
    assert [(verdict["name"], verdict["passed"]) for verdict in found["thresholds"]] == [
        ("max_kl", False), ("min_sqnr", True), ("min_top1", True),
    ]  # fmt: skip
    assert found["floor"]["kl_mean"] < 1e-9
    assert found["under_floor"] is False
    assert found["meaning"] == {"word": "small", "why": "no worse than llama.cpp Q8_0"}
    assert found["causes"]["causes"][0]["name"] == "lm_head"
    assert found["nonfinite"] is None


def test_invalid_limits_are_refused_in_one_line() -> None:
    for arguments in (("--min-top1", "99"), ("--max-kl", "small"), ("--max-kl", "-1"), ("--min-sqnr", "nan")):
        done = drift(*arguments)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
