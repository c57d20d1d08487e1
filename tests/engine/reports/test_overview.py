"""The first screen of a report shows size, drift and a third figure; the other sections follow in order of importance."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from tests.engine.reports.test_report import Page, document
from torch import nn

import dtype_engine as de
from dtype_engine import Recipe, Rule, RunSettings
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe import make_plan
from dtype_engine.reports.document import Measured, build_report
from dtype_engine.reports.html import as_fragment, as_html
from dtype_engine.reports.markdown import as_markdown
from dtype_engine.reports.notebook import drift_html
from dtype_engine.reports.overview import size_tile, third_tile, verdict_tile
from dtype_engine.results.attribution import NonFiniteDiagnosis
from dtype_engine.results.drift import DriftReport, OutputDrift
from dtype_engine.results.runs import SpeedReport, SpeedRow

MIB = 2**20
ORDER = [
    "Drift over depth", "Rules", "Worst modules", "Memory", "Values lost in the casts", "Drift", "Model",
    "Every module with weights", "How it was made",
]  # fmt: skip


class Net(nn.Module):
    """Layers with weights, and activations without, which drift too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(13))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(x)
        return out


@pytest.fixture(scope="module")
def measured() -> tuple[Any, DriftReport]:
    session = de.open(Net(), inputs=(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)),))
    session.apply(Recipe((Rule("*", "bfloat16"), Rule("head", "float16"))))
    return session, session.drift()


report_of = partial(document, title="net")


def output(sqnr_db: float = 40.0, **more: Any) -> OutputDrift:
    sizes: dict[str, Any] = {"elements": 10, "positions": 16, "mean_abs": 0.1, "max_abs": 1.0, "nonfinite": 0}
    ratios = {"rel_l2": 10 ** (-sqnr_db / 20), "sqnr_db": sqnr_db, "cosine": 1.0}
    return OutputDrift(**sizes | ratios | more)


@pytest.mark.parametrize(
    ("drift", "word", "grade", "figure"),
    [
        (output(math.inf, max_abs=0.0), "exact", "green", "SQNR exact"),
        (output(kl_mean=2e-5, top1_agreement=0.9991), "invisible", "green", "KL 2.000e-05 nats"),
        (output(60.0), "invisible", "green", "SQNR 60.00 dB"),
        (output(kl_mean=1e-3, kl_mean_se=2e-5, top1_agreement=0.98), "small", "yellow", "KL 1.000e-03 ± 2e-05 nats"),
        (output(kl_mean=2e-2, top1_agreement=0.93), "visible", "orange", "KL 2.000e-02 nats"),
        (output(2.0), "broken", "red", "SQNR 2.00 dB"),
        (output(math.nan, nonfinite=4), "broken", "red", "4 of 10 values"),
    ],
)
def test_report_shows_the_drift_as_a_word_with_figures_and_a_color(
    measured: Any, drift: OutputDrift, word: str, grade: str, figure: str
) -> None:
    report = dataclasses.replace(measured[1], output=drift, modules=())
    made = report_of((measured[0], report))
    (_, _), (classes, words), _ = Page(as_html(made)).tiles
    assert classes == {"dtype-tile", f"dtype-{grade}"}
    assert words[:3] == ["drift", word, figure]
    assert ("same top-1 class: 98.00 %" in words) == (drift.top1_agreement == 0.98)
    assert f"drift from the float32 reference is {word} (" in made.summary
    text = as_markdown(made).splitlines()
    assert [line.count("|") for line in text[2:5]] == [4, 4, 4]
    assert f"| **{word}** · {figure}" in text[4]
    style = as_html(made).partition("</style>")[0]
    assert re.search(rf"\.dtype-{grade} {{ border-left-color: #\w{{6}}; }}", style)


def test_report_without_drift_says_why_and_has_no_color() -> None:
    tree = Tree([TensorInfo("a.w", (4, 4), "float32")])
    made = build_report(
        tree, make_plan(tree, Recipe()), "m", RunSettings(), Measured(no_drift="it has no forward pass"), {}
    )
    size, drift, parameters = Page(as_html(made)).tiles
    assert size == ({"dtype-tile"}, ["size", "64 B", "as stored"])
    assert drift == ({"dtype-tile"}, ["drift", "not measured", "it has no forward pass"])
    assert parameters == ({"dtype-tile"}, ["parameters", "16", "f32"])
    assert made.summary == "m takes 64 B as it is stored; its drift was not measured: it has no forward pass."


def test_drift_tile_names_the_module_where_values_become_nonfinite(measured: Any) -> None:
    found = NonFiniteDiagnosis(
        "activation", "a.b", "a.b", "pow", "float16", 65504.0, (), 700.0, 4.9e5, ("head=bfloat16",)
    )
    broken = dataclasses.replace(measured[1], output=output(math.nan, nonfinite=4))
    assert verdict_tile(broken, "", found).details[1:] == (
        "not finite",
        "values stop being finite first in a.b: pow in float16",
    )
    headings = Page(as_html(report_of((measured[0], broken), nonfinite=found))).headings
    assert headings.index("Where values stop being finite") == headings.index("Memory") + 1


def test_size_tile_compares_planned_and_stored() -> None:
    assert size_tile(100 * MIB, 57 * MIB).details == ("43 % less",)
    assert size_tile(100 * MIB, 57 * MIB).value == "57.00 MiB of 100.00 MiB"
    assert size_tile(100 * MIB, 150 * MIB).details == ("50 % more",)
    assert size_tile(10**9, 10**9 - 1).details == ("<1 % less",)
    assert size_tile(5, 5).value == "5 B"


def test_speed_tile_appears_if_measured(measured: Any) -> None:
    rows = tuple(
        SpeedRow(what, "bf16", seconds, seconds, seconds, 3, None, False)
        for what, seconds in (("reference", 0.2), ("candidate", 0.1))
    )
    speed = SpeedReport("m", "cpu", 1, (), "inputs", rows)
    tile = Page(as_html(report_of(measured, speed=speed))).tiles[2][1]
    assert tile == ["speed against the reference", "2.00 x as fast", "100.0 ms (100.0 ms to 100.0 ms, 3 passes)"]
    planned = measured[0].tree.totals(measured[0].plan.dtypes)[""]
    assert third_tile(planned, None).details == ("bf16 97 % · f16 3 %",)


def test_summary_gives_bytes_and_drift_of_the_rules(measured: Any) -> None:
    session, drift = measured
    stored = sum(tensor.numel * 4 for tensor in session.tree.tensors.values())
    assert report_of(measured).summary.startswith(
        f"With the rules *=bfloat16, head=float16, net takes {stored / 2048:.2f} KiB instead of {stored / 1024:.2f} KiB "
        f"(50 % less); its drift from the {drift.reference} reference is "
    )
    many = make_plan(session.tree, Recipe(tuple(Rule(f"blocks.{index}", "bfloat16") for index in range(5))))
    text = build_report(session.tree, many, "net", RunSettings(), Measured(drift), {}).summary
    assert "blocks.0=bfloat16, blocks.1=bfloat16, blocks.2=bfloat16 and 2 more, net takes" in text


def test_html_and_markdown_have_the_same_sections(measured: Any) -> None:
    made = report_of(measured)
    page, text = Page(as_html(made)), as_markdown(made)
    assert page.headings == ORDER
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ORDER
    assert page.before["table"] == ORDER.index("Rules") + 1  # and no table comes before the plot
    assert page.before["svg"] == 1
    lines = [line for line in text.splitlines() if line]
    assert lines[0] == "# net"
    assert [line[:2] for line in lines[1:4]] == ["| ", "|-", "| "]
    assert lines[4].startswith("With the rules")
    assert lines[5] == "## Drift over depth"


def test_report_lists_modules_without_weights_only_among_the_worst(measured: Any) -> None:
    _, drift = measured
    low = [dataclasses.replace(each, sqnr_db=1.0) if each.name == "blocks.4.1" else each for each in drift.modules]
    made = report_of((measured[0], dataclasses.replace(drift, modules=tuple(low))))
    worst = {section.title: section for section in made.sections}["Worst modules"].blocks[-1]
    listed = {row[0] for row in worst.rows}
    without = {f"blocks.{index}.1" for index in range(13)}
    assert "blocks.4.1" in listed
    assert without - listed
    others = tuple(section for section in made.sections if section.title != "Worst modules")
    rest = as_markdown(dataclasses.replace(made, sections=others))
    for name in without:
        assert (f"{name} " in rest) == (name in listed), name  # the plot has the worst
        assert f"`{name}`" not in rest


def test_html_report_has_styles_for_phones_and_printing(measured: Any) -> None:
    text = as_html(report_of(measured))
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in text
    boxes = Page(text).boxes
    assert boxes
    assert all(classes == {"wide"} for classes in boxes)
    style = text.partition("<style>")[2].partition("</style>")[0]
    assert ".wide { overflow-x: auto; }" in style
    on_paper = style.partition("@media print {")[2]
    for rule in ("color: #000; background: #fff", "break-inside: avoid", ".wide { overflow: visible; }"):
        assert rule in on_paper
    assert "viewBox" not in text  # a picture that is scaled down has texts too small to read
    assert all('width="100%"' in picture for picture in re.findall(r"<svg[^>]*>", text))


def test_notebook_shows_the_same_tiles_as_the_html_report(measured: Any) -> None:
    _, drift = measured
    shown = Page(drift_html(drift)).tiles
    assert shown == Page(as_html(report_of(measured))).tiles[:2]
    assert "<style>.dtype-tiles" in drift_html(drift)
    assert "<style>" not in as_fragment(dataclasses.replace(report_of(measured), tiles=()))


def test_report_says_top_1_class_for_classifiers_and_token_for_text_models(measured: Any) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=5)).eval()
    session = de.open(model, inputs={"pixel_values": torch.randn(2, 3, 16, 16)})
    session.cast("*", "bfloat16")
    drift = session.drift()
    text = as_markdown(report_of((session, drift)))
    assert "same top-1 class: " in text
    assert "| same top-1 class |" in text
    assert "token" not in text
    of_tokens = dataclasses.replace(drift, sequences=dataclasses.replace(drift.sequences, of_tokens=True))
    assert "same top-1 token: " in as_markdown(report_of((session, of_tokens)))
