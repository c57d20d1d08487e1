"""A model that gives NaN by itself or when it is cast: counts, worst modules and exit statuses, beside plain torch."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.reports.notebook import drift_html
from dtype_engine.reports.text_drift import value_sentence

MODELS = '''
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 90)


class Always(Net):
    """NaN everywhere, in every dtype: its modules a and b are finite."""

    def forward(self, x):
        return self.c(torch.sqrt(self.b(torch.relu(self.a(x))) - 1e6))


class Partly(Net):
    """NaN in some rows in every dtype, and in a column in float16 alone, whose largest value is 65504."""

    def forward(self, x):
        x = self.c(self.b(self.a(x).log1p()))
        return torch.cat([x, x[..., :1] * 0 + 7e4], -1)


class Cast(Net):
    """Finite in float32, and not in float16."""

    def forward(self, x):
        return self.c(self.b(self.a(x) * 1e5))


class Fine(Net):
    def forward(self, x):
        return self.c(self.b(self.a(x)))


def example_inputs():
    return {"x": torch.randn(20, 10, 16, generator=torch.Generator().manual_seed(1))}
'''


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(MODELS)
    spec = importlib.util.spec_from_file_location("nets_in_torch", "nets.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def in_torch(models: Any, name: str, dtype: torch.dtype) -> tuple[int, int, int]:
    """How many values are not finite in the candidate, in the reference, and in the candidate alone."""
    x = models.example_inputs()["x"]
    with torch.no_grad():
        reference = getattr(models, name)()(x)
        candidate = getattr(models, name)().to(dtype)(x.to(dtype))
    bad, other = ~candidate.isfinite(), ~reference.isfinite()
    return int(bad.sum()), int(other.sum()), int((bad & ~other).sum())


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = run(cli, "dtype-engine", list(arguments))
    return (status, *capsys.readouterr())


@pytest.mark.parametrize("name", ["Always", "Partly", "Cast", "Fine"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_counts_say_on_which_side(models: Any, capsys: pytest.CaptureFixture[str], name: str, dtype: str) -> None:
    candidate, reference, alone = in_torch(models, name, getattr(torch, dtype))
    arguments = ("drift", f"nets.py:{name}", "--cast", f"*={dtype}", "--float-inputs", "model")
    status, out, err = command(capsys, *arguments, "--json")
    output = json.loads(out)["output"]
    assert (output["nonfinite_candidate"], output["nonfinite_reference"], output["nonfinite"]) == (
        candidate,
        reference,
        alone,
    )
    assert status == (1 if candidate or reference else 0)
    status, out, err = command(capsys, *arguments)
    words = f"{candidate:,} of {output['elements']:,} in the candidate, {reference:,} in the reference"
    line = next(line for line in out.splitlines() if line.startswith("non-finite"))
    assert line == f"non-finite {words if status else 0}"
    assert (f"dtype-engine: output is not finite: {words}\n" in err) == bool(status)


def test_worst_modules_are_those_that_are_not_finite(models: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = command(capsys, "drift", "nets.py:Always", "--cast", "*=bf16", "--report", "report.html")
    assert status == 1
    worst = out.partition("worst modules")[2].partition("meaning")[0].splitlines()[1:]
    assert [" ".join(line.split()) for line in worst] == ["c not finite 18,000 values in the reference itself"]
    assert "meaning    broken: the reference itself is not finite" in out
    page = Path("report.html").read_text()
    section = page.partition("Worst modules")[2].partition("</table>")[0]
    assert "18,000 in the reference" in section
    assert len(re.findall("<tr", section)) == 2, "the head and c"
    session = de.open("nets.py:Always")
    session.cast("*", "bfloat16")
    rows = drift_html(session.drift()).partition("Worst modules")[2]
    assert "not finite" in rows
    assert len(re.findall("<tr", rows.partition("</table>")[0])) == 2


def test_limit_is_missed_by_nan_on_either_side(models: Any, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ("--min-sqnr", "-99", "--max", "mean_abs=1e9", "--min", "cosine=-2", "--max", "nonfinite=1000000")
    for name, dtype in (("Always", "bf16"), ("Partly", "bf16"), ("Cast", "f16")):
        status, out, _ = command(capsys, "drift", f"nets.py:{name}", "--cast", f"*={dtype}", *limits)
        assert status == 1
        assert (out.count("\nFAIL"), out.count("\npass")) == (4, 0)
    status, out, _ = command(capsys, "drift", "nets.py:Fine", "--cast", "*=f16", *limits)
    assert (status, out.count("\npass")) == (0, 4)


def test_every_measuring_command_ends_with_status_1(models: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for dtype in ("float16", "bfloat16"):
        Path(f"{dtype}.yaml").write_text(f"version: 1\nrules:\n  - pattern: '*'\n    dtype: {dtype}\n")
    cast = ("--cast", "*=f16")
    statuses = {
        ("report", "nets.py:Fine", *cast, "-o", "fine.md"): 0,
        ("report", "nets.py:Cast", *cast, "-o", "cast.md"): 1,
        ("sweep", "nets.py:Cast", "float16.yaml", "bfloat16.yaml"): 0,
        ("sweep", "nets.py:Cast", "float16.yaml"): 1,
        ("sweep", "nets.py:Always", "float16.yaml", "bfloat16.yaml"): 1,
        ("scan", "nets.py:Fine", "--dtypes", "bf16"): 0,
        ("scan", "nets.py:Always", "--dtypes", "bf16"): 1,
        ("search", "nets.py:Fine", "--dtypes", "bf16", "--budget", "60%"): 0,
        ("search", "nets.py:Always", "--dtypes", "bf16", "--budget", "60%"): 1,
    }
    for arguments, expected in statuses.items():
        status, _, err = command(capsys, *arguments)
        assert status == expected, arguments
        assert ("finite" in err) == bool(expected), arguments


def test_no_range_of_a_dtype_is_named_as_the_reason_if_the_reference_itself_is_nan(models: Any) -> None:
    session = de.open("nets.py:Always")
    session.cast("*", "bfloat16")
    found = session.nonfinite(session.drift())
    assert found is not None
    assert (found.kind, found.operation) == ("reference", "sqrt")
    assert value_sentence(found) == ""
