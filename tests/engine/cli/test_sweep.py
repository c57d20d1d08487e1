"""Many recipes measured side by side, and a search that measures what is around its limit."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.runtime.model.test_same_plan import answer, refusal

from dtype_engine.reports.text_sweep import sweep_text
from dtype_engine.results.drift import OutputDrift
from dtype_engine.results.sweep import SweepReport, SweepRow, sweep_rows

PROMPT = ["--prompt", "The quick brown fox jumps"]
RECIPES = {
    "bf16": [("*", "bfloat16")],
    "int8": [("*", "int8")],
    "mlp": [("*.mlp", "int8"), ("*.down_proj", "stored")],
    "none": [],
}


def output(drift: float) -> OutputDrift:
    return OutputDrift(
        elements=8, mean_abs=drift, max_abs=drift, rel_l2=drift, sqnr_db=1.0, cosine=1.0, nonfinite=0, kl_mean=drift
    )


def row(name: str, planned: int, drift: float) -> SweepRow:
    return SweepRow(name, (), planned, drift, False, output(drift))


def test_sweep_marks_pareto_optimal_recipes() -> None:
    points = [(30, 0.1), (10, 0.5), (20, 0.5), (20, 0.2), (20, 0.2), (40, 0.1), (5, float("inf"))]
    rows = sweep_rows([row(str(number), *point) for number, point in enumerate(points)])
    assert [(found.planned_bytes, found.drift) for found in rows] == sorted(points)
    # By hand: what is not finite is never best; both of (20, 0.2) stay, (20, 0.5) loses to (10, 0.5), (40, 0.1) to (30, 0.1).
    assert [(found.planned_bytes, found.drift) for found in rows if found.best] == [
        (10, 0.5), (20, 0.2), (20, 0.2), (30, 0.1),
    ]  # fmt: skip


def plotted(rows: tuple[SweepRow, ...]) -> list[str]:
    return sweep_text(SweepReport("net", "inputs", 100, "KL", rows)).splitlines()


def test_sweep_plot_has_a_point_for_each_recipe_with_drift() -> None:
    rows = sweep_rows([row("a", 10, 1e-1), row("b", 20, 1e-3), row("c", 30, 1e-2), row("d", 40, 0.0)])
    drawn = [line.partition("|")[2] for line in plotted(rows) if "|" in line]
    assert [line.count("*") + line.count("o") for line in drawn] == [1, *[0] * 4, 1, *[0] * 5, 1]
    assert drawn[0][0] == "*"  # the smallest has the largest drift: top left
    assert drawn[-1] == " " * 30 + "*"  # in the middle across, and lowest
    assert all(len(line) <= 80 for line in plotted(rows))
    assert not any("|" in line for line in plotted(rows[-1:]))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    made = {}
    for name, rules in RECIPES.items():
        lines = [f'  - {{pattern: "{pattern}", dtype: {dtype}}}' for pattern, dtype in rules]
        made[name] = tmp_path / f"{name}.yaml"
        made[name].write_text("\n".join(["version: 1", "rules:" + ("" if lines else " []"), *lines, ""]))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["--workers", "2"]])
def test_sweep_figures_equal_those_of_the_drift_command(
    how: list[str], files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    swept = answer(capsys, "sweep", "demo", *map(str, files.values()), *PROMPT, "--json", *how)
    found = {Path(row["recipe"]).stem: row for row in swept["rows"]}
    assert set(found) == set(RECIPES)
    for name, file in files.items():
        alone = answer(capsys, "drift", "demo", "--recipe", str(file), *PROMPT, "--json")
        assert found[name]["output"] == alone["output"]
        assert found[name]["drift"] == alone["output"]["kl_mean"]
        assert found[name]["planned_bytes"] == alone["memory"]["planned_bytes"]
    assert found["none"]["drift"] == 0
    assert found["none"]["best"]


@pytest.mark.slow
def test_sweep_names_the_recipe_file_that_does_not_fit_the_model(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text('version: 1\nrules:\n  - {pattern: "no.such.layer", dtype: bf16}\n')
    assert f"{other}: " in refusal(capsys, "sweep", "demo", str(files["bf16"]), str(other))
    assert "named twice" in refusal(capsys, "sweep", "demo", str(files["bf16"]), str(files["bf16"]))


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["--workers", "2"]])
def test_verified_search_chooses_the_best_on_held_out_text(
    how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, recipe = tmp_path / "held out.txt", tmp_path / "found.yaml"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen.")
    search = ["search", "demo", "--budget", "40%", "--dtypes", "int8,bf16", "--draws", "4", *PROMPT, "--json"]
    verify = ["--verify", "3", "--held-out", str(text)]
    found = answer(capsys, *search, *verify, "-o", str(recipe), *how)
    measured = [each["measured"] for each in found["candidates"]]
    assert len(measured) == 3
    assert all(each["planned_bytes"] <= 0.4 * found["stored_bytes"] for each in found["candidates"])
    assert found["measured"] == min(measured)
    assert len(set(measured)) > 1
    measured_again = answer(capsys, "drift", "demo", "--recipe", str(recipe), "--text", str(text), "--json")
    assert measured_again["output"]["kl_mean"] == found["measured"]
    assert answer(capsys, *search)["predicted"] == found["candidates"][0]["predicted"]


@pytest.mark.slow
def test_verified_search_chooses_the_smallest_within_the_drift_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "held.txt"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen.")
    search = ["search", "demo", "--dtypes", "int8", "--formats", "own", "--draws", "4", *PROMPT, "--json", "--verify", "4",
              "--held-out", str(text), "--max-predicted"]  # fmt: skip
    found = answer(capsys, *search, "3e-4")
    keeping = [each["planned_bytes"] for each in found["candidates"] if each["measured"] <= 3e-4]
    assert found["planned_bytes"] == min(keeping)
    assert found["measured"] <= 3e-4
    said = refusal(capsys, "search", "demo", "--budget", "40%", "--verify", "3")
    assert "--verify K and --held-out FILE go together" in said
