"""The action for continuous integration: its steps, run as a runner does from the YAML, on the demo model."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.helpers import preloaded
from tests.helpers.paths import ROOT

ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
ENGINE = preloaded.command("import sys; sys.argv[0] = 'dtype-engine'; from dtype_engine.cli import main; main()")


class Job:
    """A job that uses the action. Values in `${{ }}` are filled in, files of the runner are in a folder."""

    def __init__(self, folder: Path, **inputs: str) -> None:
        self.folder, self.outputs = folder, dict[str, str]()
        self.inputs = {name: str(row.get("default", "")) for name, row in ACTION["inputs"].items()} | {
            name.replace("_", "-"): value for name, value in inputs.items()
        }
        assert self.inputs.keys() == ACTION["inputs"].keys()
        programs = folder / "dtype-tui" / "bin"
        programs.mkdir(parents=True)
        (programs / "dtype-engine").write_text(f'#!/bin/sh\nexec {shlex.join(ENGINE)} "$@"\n')
        (programs / "dtype-engine").chmod(0o755)

    def fill(self, text: str) -> str:
        def value(found: re.Match[str]) -> str:
            where, name = found[1].rsplit(".", 1)
            return self.inputs[name] if where == "inputs" else self.outputs[name]

        return re.sub(r"\$\{\{ ([\w.-]+) \}\}", value, text)

    def run(self, step: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        """Run one step as `shell: bash` does."""
        assert step["shell"] == "bash"
        files = {name: str(self.folder / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        env = {name: self.fill(value) for name, value in step.get("env", {}).items()}
        ended = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            env=os.environ | files | env | {"RUNNER_TEMP": str(self.folder), "GITHUB_ACTION_PATH": str(ROOT)},
            capture_output=True,
            text=True,
            cwd=self.folder,
        )
        output = self.folder / "GITHUB_OUTPUT"
        lines = output.read_text().splitlines() if output.exists() else []
        self.outputs |= dict(line.split("=", 1) for line in lines)
        return ended

    def summary(self) -> str:
        """The job summary."""
        return (self.folder / "GITHUB_STEP_SUMMARY").read_text()


INSTALL, MEASURE, SUMMARIZE = ACTION["runs"]["steps"]


def test_github_action_uses_no_other_actions_and_no_unquoted_values() -> None:
    assert ACTION["runs"]["using"] == "composite"
    for step in ACTION["runs"]["steps"]:
        assert "uses" not in step
        assert "${{" not in step["run"]
    assert 'install --quiet -c "$GITHUB_ACTION_PATH/constraints.txt" "$GITHUB_ACTION_PATH"' in INSTALL["run"]


@pytest.mark.slow
def test_github_action_fails_if_a_limit_is_missed_and_shows_the_report(tmp_path: Path) -> None:
    limits = {
        "max_kl": "1e-12\nposition:1=1000\n",
        "min_top1": "1%",
        "arguments": "--prompt=import os\n--modules=some\n",
    }
    job = Job(tmp_path, model="demo", rules="*.mlp=fp8\n*.{q,k}_proj=bf16\n", **limits)
    ended = job.run(MEASURE)
    assert ended.returncode == 1, ended.stderr
    assert "KL" in ended.stderr
    measured = json.loads(Path(job.outputs["json"]).read_text())
    assert measured["rules"] == ["*.mlp=float8_e4m3fn", "*.{q,k}_proj=bfloat16"]
    assert [each["passed"] for each in measured["thresholds"]] == [False, True, True]
    assert job.run(SUMMARIZE).returncode == 0
    assert "*.mlp" in job.summary()
    assert job.summary() == Path(job.outputs["report"]).read_text()


@pytest.mark.slow
def test_github_action_fails_if_a_figure_of_a_model_card_does_not_hold(tmp_path: Path) -> None:
    card = tmp_path / "card.md"
    words = ("--cast=*.mlp=fp8", "--prompt=import os", "--model-card", f"--output={card}")
    subprocess.run([*ENGINE, "report", *words], check=True, cwd=tmp_path)
    job = Job(tmp_path, model="demo", card="card.md", arguments="--prompt=import os")
    ended = job.run(MEASURE)
    assert ended.returncode == 0, ended.stderr
    assert "report" not in job.outputs
    text = card.read_text()
    (row,) = (line for line in text.splitlines() if line.startswith("| `bytes` |"))
    card.write_text(text.replace(row, row.replace("`bytes` | ", "`bytes` | 1")))
    ended = job.run(MEASURE)
    assert ended.returncode == 1
    found = json.loads(Path(job.outputs["json"]).read_text())
    assert [(each["kind"], each["tensor"]) for each in found["findings"]] == [("card-figure", "bytes")]
    assert '"card-figure"' in ended.stderr
    assert obeyed(ended.stderr) == []
    job.inputs["rules"] = "*.mlp=fp8"
    ended = job.run(MEASURE)
    assert (ended.returncode, "No such option '--cast'" in ended.stderr) == (2, True)


PRINTING = """#!/bin/sh
printf '##[set-output name=a]b\\n::error::c\\n::add-mask::d\\n::stop-commands::e\\n::e::\\n no end of line' >&2
printf '{"names": "::error::f"}'
"""


def obeyed(log: str) -> list[str]:
    """The lines of a log that a runner would obey: actions/runner stops at `::stop-commands::TOKEN` and goes on at `::TOKEN::`."""
    commands, token = [], ""
    for line in log.splitlines():
        if token:
            token = "" if line.strip() == f"::{token}::" else token
        elif line.startswith("::stop-commands::"):
            token = line.removeprefix("::stop-commands::")
        elif line.startswith("::") or "##[" in line:
            commands.append(line)
    return [*commands, *(["stopped for good"] if token else [])]


@pytest.mark.parametrize("end", ["exit 0", "exit 1", "exit 2", "kill -9 $$"])
def test_runner_obeys_no_workflow_commands_in_the_output_of_the_engine(tmp_path: Path, end: str) -> None:
    job = Job(tmp_path, model="demo")
    (tmp_path / "dtype-tui" / "bin" / "dtype-engine").write_text(f"{PRINTING}{end}\n")
    marks = set()
    for _ in range(2):
        ended = job.run(MEASURE)
        assert ended.returncode == {"exit 0": 0, "exit 1": 1, "exit 2": 2}.get(end, 137)
        assert "::error::c\n" in ended.stderr
        assert ended.stdout == ""
        assert obeyed(ended.stderr) == []
        assert obeyed(f"{ended.stderr}::error::g\n") == ["::error::g"]
        marks.add(ended.stderr.splitlines()[0])
    assert len(marks) == 2
    assert all(re.fullmatch("::stop-commands::[0-9a-f]{32}", mark) for mark in marks)
    assert "stop-commands" not in job.fill("".join(job.outputs.values()))


@pytest.mark.slow
def test_github_action_does_not_run_shell_code_in_its_inputs(tmp_path: Path) -> None:
    job = Job(tmp_path, model="$(touch here); `touch here`", rules='"; touch here; "=bf16')
    ended = job.run(MEASURE)
    assert ended.returncode == 2
    assert "no such folder or file" in ended.stderr
    assert job.run(SUMMARIZE).returncode == 0
    assert not (tmp_path / "here").exists()
    assert not (tmp_path / "GITHUB_STEP_SUMMARY").exists()
