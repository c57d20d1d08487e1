"""Comparisons of executions, and the floor of a candidate in its own dtypes, against plain transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.helpers.paths import DEMO

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run

PROMPTS = ("import os\nimport sys\n", "def main():\n    return 1\n")


@pytest.fixture(scope="module")
def session() -> de.Session:
    made = de.open(options=de.Options(device="cpu", threads=1, prompts=PROMPTS))
    made.cast("*", "bfloat16")
    return made


def plain(**settings: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16, **settings).eval()


def kl(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    p, q = reference.double().log_softmax(-1), candidate.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def _keeping(outputs: dict[str, torch.Tensor], name: str) -> Any:
    """A hook that keeps the first output of a module."""

    def hook(_: Any, args: Any, output: Any) -> None:
        outputs.setdefault(name, output[0] if isinstance(output, tuple) else output)

    return hook


def test_row_of_an_execution_has_the_drift_and_the_first_module_of_plain_transformers(session: de.Session) -> None:
    (row,) = session.executions([de.Execution(attention="eager")]).rows
    ids = [batch.kwargs["input_ids"] for batch in session.need_inputs().batches]
    seen: list[dict[str, torch.Tensor]] = []
    found = []
    with torch.no_grad():
        for model in (plain(), plain(attn_implementation="eager")):
            outputs: dict[str, torch.Tensor] = {}
            for name, module in model.named_modules():
                module.register_forward_hook(_keeping(outputs, name))
            found.append([model(each).logits for each in ids])
            seen.append(outputs)
    differing = [
        name
        for name, output in seen[0].items()
        if isinstance(output, torch.Tensor) and not torch.equal(output, seen[1][name])
    ]
    expected = torch.cat([kl(*pair).reshape(-1) for pair in zip(*found, strict=True)]).mean()
    assert row.output is not None
    assert row.output.kl_mean == pytest.approx(float(expected), rel=1e-6)
    assert row.first == differing[0]


def test_usual_executions_leave_out_what_the_model_runs_with_by_itself(session: de.Session) -> None:
    rows = session.executions().rows
    assert [row.execution for row in rows][:4] == [
        "attention=eager",
        "attention=math",
        "batch=2",
        "batch=2 padding=left",
    ]
    assert all(row.output is not None for row in rows)


def test_usual_executions_of_a_net_without_attention_and_tokens_are_those_of_torch() -> None:
    session = de.open(torch.nn.Linear(4, 4), inputs=torch.ones(2, 4), options=de.Options(device="cpu"))
    assert [row.execution.partition("=")[0] for row in session.executions().rows] == ["mkldnn", "threads"]


def test_default_that_another_process_sent_is_no_axis() -> None:
    """Its text is equal to the default, and not the same object."""
    assert de.Execution(padding="".join(["ri", "ght"]), matmul="".join(["high", "est"])).axes() == {}


def test_executions_that_a_model_does_not_have_are_listed_with_the_reason() -> None:
    session = de.open(torch.nn.Linear(4, 4), inputs=torch.ones(2, 4))
    report = session.executions(
        [de.Execution(attention="eager"), de.Execution(decode=True), de.Execution(mkldnn=False)]
    )
    assert [row.output is None for row in report.rows] == [True, True, False]
    assert report.rows[0].why_not == "transformers can't change the attention of Linear to eager"
    assert report.rows[1].why_not.startswith("decode=yes runs inputs of tokens alone")
    with pytest.raises(de.NoForward, match="can't change the attention"):
        session.executions([de.Execution(attention="eager")])


@pytest.fixture
def compiling() -> Iterator[None]:
    """Let torch.compile work, which the environment of the tests turns off."""
    from torch._dynamo import config

    with config.patch(disable=False):
        yield


class Branching(torch.nn.Module):
    """Its graph depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else x


@pytest.mark.usefixtures("compiling")
def test_compiled_model_is_one_graph_with_the_outputs_of_its_modules() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).to(torch.bfloat16)
    inputs = torch.randn(3, 8, dtype=torch.bfloat16)
    execution = de.Execution(compile="inductor")
    options = de.Options(device="cpu", reference="stored", settings=de.RunSettings(execution=execution))
    session = de.open(module, inputs=inputs, options=options)
    report = session.drift()
    with torch.no_grad():
        eager = module(inputs)
        compiled = torch.compile(module, backend="inductor", fullgraph=True)(inputs)
    assert report.output.max_abs == float((eager.double() - compiled.double()).abs().max())
    assert [each.name for each in report.modules] == ["0", "1", "2"]
    assert not any(each._forward_hooks for each in module.modules())
    session.cast("2", "fp8")
    with pytest.raises(de.UserError, match=r"plain tensors only: 2\.weight is in float8_e4m3fn"):
        session.drift()


@pytest.mark.usefixtures("compiling")
def test_model_that_makes_no_single_graph_is_refused() -> None:
    session = de.open(Branching(), inputs=torch.ones(2, 4))
    session.settings = de.RunSettings(execution=de.Execution(compile="aot_eager"))
    with pytest.raises(de.UserError, match="compile=aot_eager makes no single graph of this model"):
        session.drift()
    session.settings = de.RunSettings()
    assert session.drift().output.max_abs == 0


def test_floor_of_the_candidate_is_what_other_kernels_change_in_its_own_dtypes(session: de.Session) -> None:
    floor = session.candidate_floor()
    assert floor is not None
    assert floor.ways == ("eager attention", "batch of two")
    worst = 0.0
    with torch.no_grad():
        model, eager = plain(), plain(attn_implementation="eager")
        ids = [batch.kwargs["input_ids"] for batch in session.need_inputs().batches]
        own = [model(each).logits for each in ids]
        others = ([eager(each).logits for each in ids], [model(each.repeat(2, 1)).logits[:1] for each in ids])
        for other in others:
            each = torch.cat([kl(*pair).reshape(-1) for pair in zip(own, other, strict=True)])
            worst = max(worst, float(each.mean()))
    assert floor.kl_mean == pytest.approx(worst, rel=1e-6)
    drift = session.drift().output
    assert drift.kl_mean is not None
    assert floor.explains(drift) == (drift.kl_mean < 2 * worst)


def test_candidate_in_float32_has_no_floor_of_its_own() -> None:
    session = de.open(options=de.Options(prompts=PROMPTS))
    session.cast("*.mlp", "int8")
    assert session.candidate_floor() is None


def test_command_fails_executions_over_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check-execution", "demo", "--cast", "*=bf16", "--prompt", PROMPTS[0], "--device", "cpu", "--json"]
    ways = ["--execution", "attention=eager", "--execution", "threads=1"]
    assert run(cli, "dtype-engine", [*command, *ways, "--max-kl", "1e-6"]) == 1
    found = capsys.readouterr()
    eager, same = json.loads(found.out)["rows"]
    assert [row["thresholds"][0]["passed"] for row in (eager, same)] == [False, True]
    assert "attention=eager: mean KL" in found.err
    assert "threads" not in found.err.splitlines()[-1]
    assert run(cli, "dtype-engine", [*command, *ways, "--max-kl", "1"]) == 0


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (["attn=eager"], "unknown axis of execution attn; did you mean attention?"),
        (["attention=fast"], "attention=fast: choose one of eager, sdpa, math, flash, flex"),
        (["batch=0"], "batch: expected int >= 1"),
        (["batch"], "'batch' is no axis of execution"),
        (["padding=left"], "padding=left needs a batch"),
        (["decode=yes", "batch=2"], "decode=yes runs one sequence at a time"),
    ],
)
def test_wrong_axes_are_refused_in_a_sentence(axes: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = [word for axis in axes for word in ("--candidate", axis)]
    assert run(cli, "dtype-engine", ["drift", "demo", *options]) == 2
    assert words in capsys.readouterr().err


def test_axes_that_exclude_each_other_are_refused_in_python() -> None:
    session = de.open(options=de.Options(prompts=PROMPTS))
    session.settings = de.RunSettings(execution=de.Execution(decode=True, batch=2))
    with pytest.raises(de.UserError, match="decode=yes runs one sequence at a time"):
        session.drift()
    session.settings = de.RunSettings(execution=de.Execution(compile="aot_eager", decode=True))
    with pytest.raises(de.UserError, match="one at a time: leave batch and decode out"):
        session.drift()


def test_floor_of_the_candidate_is_not_measured_by_default_where_each_pass_reads_the_disk(session: de.Session) -> None:
    drift = session.drift().output
    assert session.wants_candidate_floor(drift)
    over = de.open(options=de.Options(device="cpu", over_memory=True, max_memory={"cpu": 1 << 20}, prompts=PROMPTS))
    assert over.model.memory.limited
    assert not over.wants_candidate_floor(drift)
