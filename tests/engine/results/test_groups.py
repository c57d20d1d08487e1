"""Groups of positions by name: limits on them, what stands out, and where they are shown and written."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from tests.helpers.recording_engine import demo_tree, report

from dtype_engine.cli import cli, run
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe, make_plan
from dtype_engine.recipe.provenance import recipe_text
from dtype_engine.reports.document import Measured, build_report
from dtype_engine.reports.html import as_html
from dtype_engine.reports.markdown import as_markdown
from dtype_engine.reports.notebook import drift_html
from dtype_engine.reports.text import drift_text
from dtype_engine.results.drift import DriftReport, OutputDrift
from dtype_engine.results.figures import confident_stands_out
from dtype_engine.results.groups import CONFIDENT, GROUPINGS, PositionGroup, group_named
from dtype_engine.results.thresholds import Limit, Verdict, verdicts

DEMO = ("drift", "demo", "--cast", "*=bf16", "--prompt", "import os\nimport sys\n", "--floor", "never")
CURVE = {"1": PositionGroup(2, 1e-4, 2e-5, 0.2, 1.0), "2": PositionGroup(2, 4e-4, None, 0.8, 0.5)}


def with_groups(confident: PositionGroup | None = None, curve: dict[str, PositionGroup] | None = None) -> DriftReport:
    """Return a report whose mean KL over all positions is 2.5e-4."""
    found = report(Recipe())
    groups = {"confidence": {} if confident is None else {"0.95-1": confident}, "position": curve or {}}
    return DriftReport(
        **{name: getattr(found, name) for name in DriftReport.__slots__}
        | {"output": OutputDrift(**OutputDrift.fields_of({**found.output.by_name(), "groups": groups}))}
    )


def group(kl: float = 1e-4, top1: float = 1.0) -> PositionGroup:
    return PositionGroup(100, kl, 1e-5, 0.25, top1)


def test_group_is_named_by_its_grouping_and_range() -> None:
    assert group_named("confident") == group_named(CONFIDENT) == CONFIDENT
    for name, grouping in GROUPINGS.items():
        for each in grouping.names:
            assert group_named(f"{name}:{each}") == f"{name}:{each}"


@pytest.mark.parametrize("name", ["sure", "", "confidence", "confidence:0-1", "position:3-5", "position:0", "tea:1"])
def test_unknown_group_is_refused_with_the_names_that_exist(name: str) -> None:
    with pytest.raises(UserError, match=r"there are confident, confidence:0-0\.25, .*, position:3-4, position:5-8 and"):
        group_named(name)


@pytest.mark.parametrize(
    ("found", "stands_out"),
    [
        (None, False), (group(2.4e-4), False), (group(2.5e-4), False), (group(2.6e-4), True), (group(1e-6, 0.99), True),
    ],
)  # fmt: skip
def test_confident_group_stands_out_with_a_larger_kl_or_another_top_1(
    found: PositionGroup | None, stands_out: bool
) -> None:
    assert confident_stands_out(with_groups(found).output) == stands_out


def verdict(limit: Limit, found: PositionGroup | None, **others: Any) -> Verdict:
    output = with_groups(found).output
    return verdicts(
        [limit], OutputDrift(**OutputDrift.fields_of({**output.by_name(), "groups": output.groups, **others}))
    )[0]


def test_limit_on_a_group_is_judged_by_its_own_figures() -> None:
    kl = Limit("max-kl confident", "kl_mean", 1e-3, group=CONFIDENT)
    assert str(verdict(kl, group(5e-4))) == "mean KL (confident) 0.0005 nats: at most 0.001 nats"
    assert verdict(kl, group(2e-3)).short == "KL (confident) 0.002 > 0.001 nats"
    assert not verdict(kl, group(2e-3)).passed
    top1 = Limit("min-top1 confident", "top1_agreement", 0.99, group=CONFIDENT)
    assert str(verdict(top1, group(top1=0.95))) == "same top-1 (confident) 95 %: under the limit, 99 %"
    assert verdict(top1, group()).passed


def test_limit_on_a_group_without_positions_is_not_met() -> None:
    kl = Limit("max-kl confident", "kl_mean", 1e-3, group=CONFIDENT)
    assert str(verdict(kl, None)).startswith("mean KL (confident): this output has none")
    assert not verdict(kl, None).passed
    assert "not finite in the reference" in str(verdict(kl, None, kl_mean=float("nan"), nonfinite_reference=3))
    assert not verdict(kl, group(), nonfinite=1).passed


def test_command_limits_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "dtype-engine", [*DEMO, "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["output"]["groups"]
    (place, found), *_ = reversed(groups["position"].items())
    kl = found["kl_mean"]
    limits = ("--max-kl", "1", "--max-kl", f"position:{place}={kl / 2}", "--min-top1", f"position:{place}=1%")
    assert run(cli, "dtype-engine", [*DEMO, "--json", *limits]) == 1
    out, said = capsys.readouterr()
    name = f"max-kl position:{place}"
    assert [(each["name"], each["passed"]) for each in json.loads(out)["thresholds"]] == [
        ("max_kl", True), (name, False), (f"min-top1 position:{place}", True),
    ]  # fmt: skip
    assert re.search(rf"--{name} is missed: mean KL \(position {place.replace('-', '–')}\) [\d.e-]+ nats: over", said)
    assert run(cli, "dtype-engine", [*DEMO, "--max-kl", f"position:{place}={kl * 2}"]) == 0
    assert re.search(r"\npass       mean KL \(position .*\n", capsys.readouterr().out)


@pytest.mark.parametrize("limit", ["tea=1", "confident=", "confident", "confident=-1", "=1", "position:7=1"])
def test_command_refuses_a_wrong_limit_on_a_group_in_one_line(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "dtype-engine", [*DEMO, "--max-kl", limit]) == 2
    out, said = capsys.readouterr()
    assert (out, len(said.splitlines())) == ("", 1)
    assert "Traceback" not in said


def test_option_max_limits_the_confident_group_as_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "dtype-engine", [*DEMO, "--max", "kl_confident=0"]) == 1
    assert "mean KL (confident)" in capsys.readouterr().err


def table(text: str) -> list[str]:
    """Return the rows of the tables of groups, with single spaces."""
    found = [" ".join(line.split()) for line in text.splitlines() if line.startswith("  ")]
    return [line for line in found if line.endswith("%") or "top-1" in line]


def test_text_has_groups_by_confidence_and_on_request_by_position() -> None:
    found = with_groups(group(), CURVE)
    heads = "count mean KL, nats part of the KL same top-1"
    by_confidence = [f"confidence {heads}", "0.95–1 100 1.00e-04 ± 1e-05 25.0 % 100.00 %"]
    by_position = [f"position {heads}", "1 2 1.00e-04 ± 2e-05 20.0 % 100.00 %", "2 2 4.00e-04 80.0 % 50.00 %"]
    assert table(drift_text(found)) == by_confidence
    assert table(drift_text(found, positions=True)) == by_confidence + by_position
    assert "\npositions  none: " in drift_text(with_groups(group()), positions=True)


def test_reports_have_tables_of_the_groups_and_a_curve_by_position() -> None:
    found, tree = with_groups(group(), CURVE), demo_tree()
    page = build_report(tree, make_plan(tree, Recipe()), "demo", RunSettings(), Measured(found), {})
    markdown = as_markdown(page)
    assert "## Drift by confidence of the reference" in markdown
    assert "| 0.95–1 | 100 | 1.00e-04 ± 1e-05 | 25.0 % | 100.00 % |" in markdown
    assert re.search(
        r"Mean KL by position in the sequence, in nats:\n\n```\n1  1.00e-04  █{10}\n2  4.00e-04  █{40}\n", markdown
    )
    for text in (as_html(page), drift_html(found)):
        assert "<h2>Drift by position in the sequence</h2>" in text
        assert "<title>2: 4.00e-04 nats</title>" in text
        assert "<p>highest: 4.00e-04 nats 2, column 2 of 2</p>" in text
    without = build_report(tree, make_plan(tree, Recipe()), "demo", RunSettings(), Measured(report(Recipe())), {})
    assert "Drift by" not in as_markdown(without)


def test_recipe_file_has_the_mean_kl_of_the_confident_group() -> None:
    text = recipe_text(demo_tree(), make_plan(demo_tree(), Recipe()), "demo", report=with_groups(group(3e-4)))
    assert yaml.safe_load(text)["measured"]["kl_confident"] == 3e-4


@pytest.mark.slow
def test_executions_are_limited_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check-execution", *DEMO[1:6], "--execution", "attention=eager"]
    assert run(cli, "dtype-engine", [*command, "--max-kl", "position:1=1", "--max-kl", "position:5-8=0"]) == 1
    said = capsys.readouterr().err
    assert "mean KL (position 5–8)" in said
    assert "position 1" not in said
