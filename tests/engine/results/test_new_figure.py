"""A figure that was only added to the table `FIGURES` is in everything that the engine writes, and can be limited."""

from __future__ import annotations

import typing

import pytest
import yaml
from tests.helpers.recording_engine import demo_tree, report
from tests.helpers.toy_figure import TOY

from dtype_engine.cli.thresholds import all_limits
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe, make_plan
from dtype_engine.recipe.provenance import recipe_text
from dtype_engine.reports.document import Measured, build_report
from dtype_engine.reports.html import as_html
from dtype_engine.reports.markdown import as_markdown
from dtype_engine.reports.notebook import drift_html, drift_repr
from dtype_engine.reports.text import drift_text
from dtype_engine.results.as_json import as_json
from dtype_engine.results.drift import NAMES
from dtype_engine.results.figures import FIGURES, View
from dtype_engine.results.thresholds import verdicts

REPORT = report(Recipe())
TREE = demo_tree()
SHOWN = f"{1.25e-3 / 0.5:.5f}"


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FIGURES, TOY.name, TOY)


def test_new_figure_is_in_text_reports_and_recipe_files() -> None:
    plan = make_plan(TREE, Recipe())
    page = build_report(TREE, plan, "demo", RunSettings(), Measured(REPORT), {})
    assert f"\nmean/max   {SHOWN}\n" in drift_text(REPORT)
    assert as_json(REPORT)["output"]["mean_to_max"] == 2.5e-3
    assert f"<td>mean/max</td><td>{SHOWN}</td><td>how even the error is</td>" in as_html(page)
    assert f"| mean/max | {SHOWN} | how even the error is |" in as_markdown(page)
    assert f"<td>mean/max</td><td>{SHOWN}</td>" in drift_html(REPORT)
    assert f"mean/max {SHOWN}" in drift_repr(REPORT)
    recipe = recipe_text(TREE, plan, "demo", report=REPORT)
    assert "  mean_to_max: 0.0025  # from 0 to 1\n" in recipe
    assert yaml.safe_load(recipe)["measured"]["mean_to_max"] == 0.0025


@pytest.mark.parametrize(
    ("option", "limit", "says"),
    [
        ("least", "0.002", "mean/max 0.0025: at least 0.002"),
        ("least", "1%", "mean/max 0.0025: under the limit, 0.01"),
        ("most", "0.002", "mean/max 0.0025: over the limit, 0.002"),
    ],
)
def test_options_min_and_max_set_limits_on_a_new_figure(option: str, limit: str, says: str) -> None:
    options = {"max_kl": None, "min_sqnr": None, "min_top1": None, "least": (), "most": ()}
    limits = all_limits(options | {option: (f"mean_to_max={limit}",)}, ())
    (verdict,) = verdicts(limits, REPORT.output)
    assert str(verdict) == says
    with pytest.raises(UserError, match="no figure, --metric or --eval has this name"):
        all_limits(options | {option: (f"mean_to={limit}",)}, ())


def test_rows_in_the_table_of_figures_name_existing_fields_and_views() -> None:
    for row in FIGURES.values():
        assert row.compute is not None or row.name in NAMES
        assert set(row.shown or ()) <= set(typing.get_args(View))
