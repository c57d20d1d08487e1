"""A task of lm-eval from local files, against what lm-eval itself finds for the same model, stored and cast by hand."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest
import torch

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.errors import UserError

TASK = """
task: which_line
dataset_path: json
dataset_kwargs: {data_files: {test: DOCS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
LINES = [
    "import os",
    "def main():",
    "    return 0",
    "class Tree:",
    "for line in lines:",
    "x = [1, 2, 3]",
    "print(x)",
    "try:",
]


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    draw = random.Random(0)
    docs = [
        {"prompt": draw.choice(LINES) + "\n", "choices": draw.sample(LINES, 2), "label": draw.randrange(2)}
        for _ in range(24)
    ]
    (tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
    (tmp_path / "task.yaml").write_text(TASK.replace("DOCS", str(tmp_path / "docs.jsonl")))
    return str(tmp_path / "task.yaml")


def test_lm_eval_scores_of_reference_and_candidate_equal_those_of_lm_eval(task: str) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    session = de.open(options=de.Options(metrics=(f"lm-eval:{task}",), prompts=("import os",)))
    module, tokenizer = copy.deepcopy(session.model.module), session.need_inputs().tokenizer
    session.cast("*", "float8_e5m2")
    changes = {change.name: change for change in session.drift().metrics}
    for side in ("reference", "candidate"):
        if side == "candidate":
            with torch.no_grad():
                for weight in module.parameters():
                    weight.copy_(weight.to(torch.float8_e5m2).to(weight.dtype))
        manager = TaskManager(include_defaults=False)
        lm = HFLM(pretrained=module, tokenizer=tokenizer, batch_size=8)
        tasks = list(manager.load(task)["tasks"].values())
        found = simple_evaluate(lm, tasks=tasks, task_manager=manager, bootstrap_iters=0)["results"]["which_line"]
        for metric in ("acc", "acc_norm"):
            assert getattr(changes[f"which_line/{metric}"], side) == pytest.approx(found[f"{metric},none"], abs=1e-9)
    assert [change.examples for change in changes.values()] == [24, 24]
    assert any(change.changed for change in changes.values())
    assert all(change.error is not None and change.error < 0.1 for change in changes.values())


def test_missed_lm_eval_limit_exits_with_1_and_a_missing_task_is_refused(
    task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["drift", "--prompt", "import os", "--json", "--eval"]
    assert run(cli, "dtype-engine", [*arguments, f"lm-eval:{task}", "--min", "which_line/acc=+0.1%"]) == 1
    out, err = capsys.readouterr()
    assert "--min which_line/acc is missed: change of which_line/acc 0: under the limit, 0.001" in err
    assert [metric["name"] for metric in json.loads(out)["metrics"]] == ["which_line/acc", "which_line/acc_norm"]
    with pytest.raises(UserError, match="there is no file"):
        de.open(options=de.Options(metrics=("lm-eval:missing.yaml",), prompts=("import os",))).drift()
