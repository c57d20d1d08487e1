"""Each promise of `.github/SECURITY.md` names a test that shows it. That what it names is there, `tests/test_layout.py` sees."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from tests.helpers.paths import ROOT

PAGE = ROOT / ".github" / "SECURITY.md"
PROSE = "What the programs do to your files"
"""The section whose paragraphs are promises. Those of the others are in tables."""
_TEST = re.compile(r"`([\w./]*)::(test_\w+)`")


def promises(page: str) -> Iterator[str]:
    """The rows of all tables but for their heads, and the paragraphs of the section in prose."""
    for section in page.split("\n## "):
        title, _, text = section.partition("\n")
        lines = text.splitlines()
        for number, line in enumerate(lines):
            is_head = number + 1 < len(lines) and lines[number + 1].startswith("|---")
            if line.startswith("|") and not line.startswith("|---") and not is_head:
                yield line
        if title == PROSE:
            yield from (paragraph for paragraph in text.split("\n\n") if paragraph.strip())


def without_test(page: str) -> list[str]:
    return [promise for promise in promises(page) if _TEST.search(promise) is None]


def named(page: str) -> Iterator[tuple[str, str]]:
    """The file and the name of each test, in a path from the root; `::TEST` is one of the file before."""
    path = ""
    for file, test in _TEST.findall(page):
        path = (file and (file if file.startswith("tests/") else f"tests/engine/{file}")) or path
        yield path, test


def test_each_promise_of_security_md_names_an_existing_test() -> None:
    page = PAGE.read_text()
    assert without_test(page) == []
    assert len(list(promises(page))) > 40
    for path, test in named(page):
        assert re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{test}"


@pytest.mark.parametrize(
    "promise",
    [
        "\n## A\n\n| file | it can't |\n|---|---|\n| a | run code | `test_a.py` |\n",
        f"\n## {PROSE}\n\nNothing is written.\n",
    ],
)
def test_lint_finds_a_security_promise_without_a_test(promise: str) -> None:
    page = PAGE.read_text()
    assert len(without_test(page + promise)) == 1
    assert (
        without_test(page + promise.replace("`test_a.py`", "`test_a.py::test_it`").replace(".\n", " (`::test_it`).\n"))
        == []
    )
