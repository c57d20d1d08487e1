"""What a prompt and a notebook show of a session and its results."""

from __future__ import annotations

import pydoc
from html.parser import HTMLParser

import pytest

import dtype_engine as de
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.runtime.session.session import Session

pytestmark = pytest.mark.slow
NASTY = "<script>alert(1)</script>"
VOID = ("br", "meta", "img")


@pytest.fixture
def session() -> Session:
    return de.open(options=de.Options(device="cpu", prompts=("The quick brown fox jumps over the lazy dog",)))


class Balanced(HTMLParser):
    """Parses HTML. Fails if an element is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(html: str) -> Balanced:
    parser = Balanced()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert not parser.tags & {"script", "html", "body", "link", "iframe"}
    return parser


def test_repr_of_session_and_results_has_at_most_five_lines(session: Session) -> None:
    plan = session.cast("*.mlp", "bfloat16")
    drift, scan = session.drift(), session.scan(["bfloat16", "int8"], draws=1)
    found = session.search(budget="45%")
    for shown in (plan, drift, scan, found, session, session.tree):
        assert 1 <= len(repr(shown).splitlines()) <= 5
        assert repr(shown).startswith(type(shown).__name__)
        assert len(repr(shown)) < 1000
    assert "*.mlp=bfloat16" in repr(session)
    assert "stored 2.70 MiB → planned 1.86 MiB" in repr(session)
    assert "stored 2.70 MiB → planned 1.86 MiB" in repr(plan)
    assert f"{drift.output.max_abs:.4e}" in repr(drift)
    assert max(scan.weights, key=lambda weight: weight.score).name in repr(scan)
    assert f"{found.predicted:.4e}" in repr(found)
    assert repr(session.tree).startswith("Tree: ")


def test_notebook_shows_session_and_results_as_tables(session: Session) -> None:
    session.cast("*.mlp", "bfloat16")
    drift, scan = session.drift(), session.scan(["bfloat16", "int8"], draws=1)
    of_drift = read(drift._repr_html_())  # type: ignore[attr-defined]
    assert f"{drift.output.max_abs:.4e}" in of_drift.texts
    of_scan = read(scan._repr_html_())  # type: ignore[attr-defined]
    assert max(scan.weights, key=lambda weight: weight.score).name in of_scan.texts
    of_session = read(session._repr_html_())
    assert "*.mlp" in of_session.texts
    of_tree = read(session.tree._repr_html_())  # type: ignore[attr-defined]
    assert "LlamaForCausalLM" in of_tree.texts
    assert all("table" in each.tags for each in (of_drift, of_scan, of_session, of_tree))


def test_names_from_files_are_escaped_in_notebooks() -> None:
    tree = Tree([TensorInfo(f"{NASTY}.weight\x1b[2J", (2, 2), "float32")], {"": NASTY, NASTY: NASTY})
    parser = read(tree._repr_html_())  # type: ignore[attr-defined]
    assert NASTY in "".join(parser.texts)
    assert "\x1b" not in tree._repr_html_()  # type: ignore[attr-defined]
    assert "\x1b" not in repr(tree)


def test_help_on_session_shows_no_memory_addresses() -> None:
    shown = pydoc.render_doc(de.Session, renderer=pydoc.plaintext)
    assert "on_progress: 'OnParts' = ignore" in shown
    assert "cancelled: 'IsCancelled' = never" in shown
    assert " at 0x" not in shown


def test_dir_of_the_package_lists_its_public_names() -> None:
    assert dir(de) == sorted(de.__all__)
    assert not hasattr(de, "Sessions")


@pytest.mark.parametrize("budget", ["1.3MiB", 1363148])
def test_search_budget_is_accepted_as_text(session: Session, budget: int | str) -> None:
    session.scan(["bfloat16", "int8"], draws=1)
    assert session.search(budget=budget).planned_bytes <= 1363148


def test_invalid_text_for_a_search_budget_is_refused(session: Session) -> None:
    session.scan(["bfloat16"], draws=1)
    with pytest.raises(de.UserError, match="12GiB"):
        session.search(budget="small")
