"""Reports and saved recipes contain the figures of their run, and all their text is escaped."""

from __future__ import annotations

import html.parser
import json
import re
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.engine.runtime.model.test_same_plan import refusal
from tests.helpers.paths import TINYNET

import dtype_engine as de
from dtype_engine import Recipe, Rule, RunSettings
from dtype_engine.cli import cli, run
from dtype_engine.core.errors import UserError
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe import make_plan
from dtype_engine.recipe.file import read_recipe_file
from dtype_engine.recipe.provenance import recipe_text
from dtype_engine.reports.blocks import BarChart, Identifier, Report, Section, StackedBars, Table, Tile
from dtype_engine.reports.document import Measured, build_report
from dtype_engine.reports.render import render
from dtype_engine.reports.versions import versions
from dtype_engine.results.attribution import NonFiniteDiagnosis
from dtype_engine.results.drift import DriftReport

CASTS = ("*=bfloat16", "*norm*=float32", "*.mlp=float8_e4m3fn")
NASTY = "a<script>alert(1)</script>&\"'|`x`[y](javascript:z)\x1b[2J\u202e"


@pytest.fixture(scope="module")
def measured() -> tuple[de.session.Session, DriftReport]:  # type: ignore[name-defined]
    session = de.open(f"{TINYNET}:TinyNet")
    session.apply(Recipe((Rule("*", "bfloat16"), Rule("type:LayerNorm", "float32"))))
    return session, session.drift()


def ancestors(name: str) -> list[str]:
    """The modules that a tensor is in, outermost first, without the whole model."""
    parts = name.split(".")[:-1]
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


class Page(html.parser.HTMLParser):
    """What is on a page: its tags, the attributes that could fetch or run something, its tiles, headings and tables."""

    VOID = frozenset({"meta", "rect", "line"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.reaching: list[tuple[str, str | None]] = []
        self.rows: list[list[str]] = []
        self.tiles: list[tuple[set[str], list[str]]] = []
        """(classes, texts of the paragraphs) of each."""
        self.headings: list[str] = []
        self.before: dict[str, int] = {}
        """How many headings come before the first element of each tag."""
        self.boxes: list[set[str]] = []
        """The classes of what is around each table."""
        self._open: list[tuple[str, set[str]]] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.before.setdefault(tag, len(self.headings))
        self.reaching += [
            (name, value) for name, value in attributes if name in ("src", "href") or name.startswith("on")
        ]
        classes = set((dict(attributes).get("class") or "").split())
        if "dtype-tile" in classes:
            self.tiles.append((classes, []))
        if tag == "table":
            self.boxes.append(self._open[-1][1])
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in self.VOID:
            self._open.append((tag, classes))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self._open]
        if "td" in tags or "th" in tags:
            self.rows[-1][-1] += data
        if tags[-1:] == ["h2"]:
            self.headings.append(data)
        if any("dtype-tile" in classes for _, classes in self._open) and data.strip():
            self.tiles[-1][1].append(data)


def document(measured: Any, title: str = "TinyNet", **more: Any) -> Report:
    session, drift = measured
    return build_report(session.tree, session.plan, title, RunSettings(), Measured(drift, **more), versions())


def test_html_report_has_the_figures_of_the_measurement(measured: Any, tmp_path: Path) -> None:
    session, drift = measured
    page = Page(render(document(measured), tmp_path / "report.html"))
    rows = {row[0]: row[1:] for row in page.rows if row}
    output = drift.output
    assert rows["mean |Δ|"][0] == f"{output.mean_abs:.4e}"
    assert rows["max |Δ|"][0] == f"{output.max_abs:.4e}"
    assert rows["SQNR"][0] == f"{output.sqnr_db:.2f} dB"
    assert rows["1"][:3] == ["*", "bfloat16", f"{len(session.plan.selections[0].tensors)}"]
    norms = sum(t.numel for t in session.tree.tensors.values() if "norm" in t.name)
    everything = sum(t.numel for t in session.tree.tensors.values())
    assert rows["float32"] == [str(everything), f"{4 * everything} B", str(norms), f"{4 * norms} B"]
    assert rows["bfloat16"] == ["0", "0 B", str(everything - norms), f"{2 * (everything - norms)} B"]
    assert session.plan.planned_bytes == 4 * norms + 2 * (everything - norms)
    assert rows["torch"] == [__import__("torch").__version__]
    assert rows["inputs"] == [drift.inputs]
    held = {name for tensor in session.tree.tensors for name in ancestors(tensor)}
    for reading in drift.modules:
        if reading.name in held:
            assert any(row[0] == reading.name and f"{reading.max_abs:.3e}" in row for row in page.rows), reading.name


def test_html_report_has_no_scripts_and_no_external_resources(measured: Any, tmp_path: Path) -> None:
    text = render(document(measured), tmp_path / "report.html")
    page = Page(text)
    assert page.reaching == []
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "form", "a"})
    assert "url(" not in text
    assert "default-src 'none'" in text
    pictures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(pictures) == 3  # SQNR over depth, and a bar each for the stored and the planned bytes
    for picture in pictures:
        xml.etree.ElementTree.fromstring(picture)


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_names_in_reports_are_escaped(name: str, tmp_path: Path) -> None:
    tree = Tree(
        [TensorInfo(f"{NASTY}.w", (4, 4), "float32", "parameter"), TensorInfo("b.w", (3,), "float32", "parameter")],
        {"": NASTY, NASTY: NASTY},
    )
    recipe = Recipe((Rule(NASTY, "bfloat16"), Rule("*", "float16")))
    made = build_report(tree, make_plan(tree, recipe), NASTY, RunSettings(), Measured(no_drift=NASTY), {"torch": NASTY})
    text = render(made, tmp_path / name)
    assert "\x1b" not in text
    assert "\u202e" not in text
    if name.endswith("html"):
        assert "script" not in Page(text).tags
        assert "<script" not in text
        return
    outside_of_code = re.sub(r"(`+)( ?).*?\2\1", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    assert not re.search(r"(?<!\\)<", outside_of_code)
    assert not re.search(r"(?<!\\)\]\(", outside_of_code)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    widths = [len(re.findall(r"(?<!\\)\|", line)) for line in tables]
    for before, after, line in zip(widths, widths[1:], tables[1:], strict=False):
        if line.startswith("|---") or set(line) <= set("|-:"):
            assert before == after


def test_hostile_text_in_every_kind_of_report_block_is_escaped(tmp_path: Path) -> None:
    """Tests also blocks that contain no text from files in any report so far."""
    blocks = (
        NASTY, Identifier(NASTY), Table((NASTY, "b"), ((NASTY, Identifier(NASTY)),), 1),
        StackedBars(NASTY, ((NASTY, ((NASTY, 1.0, NASTY),)),)), BarChart(NASTY, ((NASTY, 1.0), ("none", None)), NASTY),
    )  # fmt: skip
    tiles = (Tile(NASTY, NASTY, (NASTY,), "red"),)
    text = render(Report(NASTY, NASTY, (Section(NASTY, blocks),), tiles), tmp_path / "r.html")
    page = Page(text)
    assert page.reaching == []
    assert "script" not in page.tags
    shown = NASTY.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert page.rows == [[shown, "b"], [shown, shown]]
    assert text.count('class="n"') == 2


def test_text_cannot_end_a_code_block_or_notify_anybody_by_a_markdown_report(tmp_path: Path) -> None:
    hostile = "a\n```\n@octocat, me@host.org and `@x`"
    blocks = (
        hostile, Table((hostile,), ((hostile,),)), StackedBars("bars", ((hostile, ((hostile, 1.0, hostile),)),)),
        BarChart("chart", ((hostile, 1.0),), "dB"),
    )  # fmt: skip
    text = render(
        Report(hostile, hostile, (Section(hostile, blocks),), (Tile("a", hostile, (hostile,)),)), tmp_path / "r.md"
    )
    fences = [line for line in text.splitlines() if line.startswith("```")]
    assert len(fences) == 4
    outside = re.sub(r"^```\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert outside.count("`@`octocat, me`@`host.org and ") == text.count("octocat") - 3
    assert not re.search(r"(?<!`)@", outside)


def test_every_table_row_of_the_html_report_is_in_the_markdown_report(measured: Any, tmp_path: Path) -> None:
    made = document(measured)
    page = Page(render(made, tmp_path / "r.html"))
    text = render(made, tmp_path / "r.md").replace("\\", "").replace("`", "")
    for row in page.rows:
        assert f"| {' | '.join(row)} |" in text


def test_report_of_a_large_tree_folds_alike_modules_and_limits_the_table(tmp_path: Path) -> None:
    tensors = [
        TensorInfo(f"model.layers.{layer}.mlp.experts.{expert}.w", (2, 2), "bfloat16", "parameter")
        for layer in range(60) for expert in range(64)
    ]  # fmt: skip
    tree = Tree(tensors)
    text = render(build_report(tree, make_plan(tree, Recipe()), "m", RunSettings(), Measured(), {}), tmp_path / "r.md")
    assert "`model.layers.{0..59}.mlp.experts.{0..63}`" in text
    assert re.search(r"`model\.layers\.\{0\.\.59\}\.mlp` \|  \| 15\.4 k \| 30\.00 KiB \| 30\.00 KiB \| bf16", text)
    assert "2,022 more modules are left out here" in text


def test_report_command_writes_an_html_file_and_does_not_overwrite_existing_files(
    make_llama: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, file = make_llama(), tmp_path / "r.html"
    casts = [part for cast in CASTS for part in ("--cast", cast)]
    assert run(cli, "dtype-engine", ["report", str(source), *casts, "--speed", "-o", str(file)]) == 0
    assert "speed against the reference" in file.read_text()
    assert run(cli, "dtype-engine", ["drift", str(source), *casts, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.partition("\n")[2])["output"]
    rows = {row[0]: row[1:] for row in Page(file.read_text()).rows if row}
    assert rows["KL, mean"][0].startswith(f"{figures['kl_mean']:.4e}")
    before = file.read_bytes()
    for name, words in (
        ("r.html", "replace it with --force"),
        ("r.txt", "name a report .html or .md"),
        ("none/r.md", "there is no folder"),
    ):
        assert words in refusal(capsys, "report", str(source), "-o", str(tmp_path / name))
    assert file.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["llama", "r.html"]


def test_saved_recipe_file_reproduces_the_drift_that_the_file_records(
    make_llama: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, file = make_llama(), tmp_path / "recipe.yaml"
    casts = [part for cast in CASTS for part in ("--cast", cast)]
    arguments = ["drift", str(source), "--float-inputs", "model", "--json"]
    assert run(cli, "dtype-engine", [*arguments, *casts, "--save-recipe", str(file)]) == 0
    first = json.loads(capsys.readouterr().out)
    written = read_recipe_file(file)
    assert [str(rule) for rule in written.recipe.rules] == first["rules"]
    assert written.settings == RunSettings(float_inputs="model")
    for name in ("mean_abs", "max_abs", "sqnr_db", "kl_mean", "top1_agreement"):
        assert written.measured[name] == pytest.approx(first["output"][name], rel=1e-5)
    assert written.measured["planned_bytes"] == first["memory"]["planned_bytes"]
    assert written.measured["torch"] == __import__("torch").__version__
    assert yaml.safe_load(file.read_text())["model"] == "llama"
    assert re.search(
        r'pattern: "\*norm\*", dtype: float32}  # 5 tensors, 640 B -> 640 B$', file.read_text(), re.MULTILINE
    )

    assert run(cli, "dtype-engine", ["drift", str(source), "--recipe", str(file), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["output"] == first["output"]
    assert "was made for" not in err
    assert "replace it with --force" in refusal(capsys, *arguments, *casts, "--save-recipe", str(file))
    text = file.read_text()
    assert run(cli, "dtype-engine", [*arguments, *casts, "--save-recipe", str(file), "--force"]) == 0
    assert file.read_text() == text  # the same run writes the same file: a difference is a difference


def test_recipe_for_another_model_lists_rules_without_matches(
    make_llama: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "version: 1\nmodel: other\nrules:\n- {pattern: '*.mlp', dtype: bf16}\n- {pattern: '*.moe', dtype: bf16}\n"
        "- {pattern: 'type:Mamba', dtype: bf16}\n"
    )
    source = make_llama()
    capsys.readouterr()  # what transformers says as it saves
    said = refusal(capsys, "drift", str(source), "--recipe", str(file))
    assert "'*.moe' matches nothing" in said
    assert "nor does 1 more rule match anything: 'type:Mamba'" in said
    file.write_text("version: 1\nmodel: other\nrules:\n- {pattern: '*.mlp', dtype: bf16}\n")
    assert run(cli, "dtype-engine", ["drift", str(source), "--recipe", str(file), "--json"]) == 0
    assert f"{file} was made for other, and this is llama" in capsys.readouterr().err


def test_comments_in_a_recipe_file_say_what_each_rule_matches(measured: Any) -> None:
    session, drift = measured
    text = recipe_text(session.tree, session.plan, "TinyNet", RunSettings(), drift)
    total = session.tree.stored_bytes
    assert f"# {len(session.tree.tensors)} tensors, decides" in text
    assert f", {total} B -> {total // 2} B" in text
    assert "sqnr_db" in text
    assert "  # decibels" in text


def test_report_file_name_without_a_known_suffix_is_refused(measured: Any) -> None:
    with pytest.raises(UserError, match=r"\.html or \.md"):
        render(document(measured), Path("report"))


@pytest.mark.parametrize("name", ["r.html", "r.md"])
def test_report_says_where_values_become_nonfinite_and_gives_the_remedy(name: str, tmp_path: Path) -> None:
    found = NonFiniteDiagnosis(
        "activation", "a.b", "a.b", "pow", "float16", 65504.0, (), 700.0, 4.9e5, ("a.{2,3}=bfloat16", "head=bfloat16")
    )  # fmt: skip
    tree = Tree([TensorInfo("a.w", (3,), "float32")])
    made = build_report(tree, make_plan(tree, Recipe()), "m", RunSettings(), Measured(nonfinite=found), {})
    text = render(made, tmp_path / name)
    for words in ("a.b: pow in float16", "65504", "a.{2,3}=bfloat16", "head=bfloat16", "the output is finite"):
        assert words in text.replace("\\", ""), words


def test_report_command_diagnoses_an_overflowing_recipe(tmp_path: Path) -> None:
    source = tmp_path / "net.py"
    source.write_text(
        "import torch\n\nclass Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        torch.manual_seed(0)\n"
        "        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)\n"
        "        with torch.no_grad():\n            self.a.weight.fill_(6e4)\n"
        "    def forward(self, x):\n        return self.b(self.a(x))\n\n"
        "def example_inputs():\n    return {'x': torch.ones(2, 8)}\n"
    )
    arguments = ["report", f"{source}:Net", "--cast", "*=float16", "-o", str(tmp_path / "r.md")]
    assert run(cli, "dtype-engine", arguments) == 1, "the output is not finite"
    text = (tmp_path / "r.md").read_text()
    assert "Where values stop being finite" in text
    assert "linear in float16" in text
    assert "bfloat16" in text.partition("Where values stop being finite")[2].partition("##")[0]
