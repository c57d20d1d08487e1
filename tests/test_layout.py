"""What the README files say about files and tests is true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tests.helpers.paths import ROOT

PACKAGES = (ROOT / "engine" / "dtype_engine", ROOT / "tui" / "dtype_tui")
FILES = sorted(file for package in PACKAGES for file in package.rglob("*.py"))
PAGES = [
    *ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("*/docs/**/*.md"), *(ROOT / ".github").rglob("*.md"),
]  # fmt: skip


def test_imports_are_absolute() -> None:
    texts = {file: file.read_text() for file in FILES}
    relative = [
        str(file.relative_to(ROOT))
        for file, text in texts.items()
        if re.search(r"\bfrom\s*\.", text)  # others need not be parsed
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_readme_lists_every_file_and_folder_of_its_package(package: Path) -> None:
    entries = {
        entry.name
        for entry in package.iterdir()
        if entry.is_file() or any(file.suffix != ".pyc" for file in entry.rglob("*.*"))
    }
    drawn = re.search(rf"```\n{package.name}/\n(.*?)```", (package.parent / "README.md").read_text(), re.DOTALL)
    assert drawn
    assert set(re.findall(r"^[├└]── ([\w.]+)", drawn[1], re.MULTILINE)) == entries


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_tests_named_in_pages_exist(page: Path) -> None:
    """Checked are a page's links to files, and the tests that it names as `FILE::TEST`. `::TEST` alone is a test of the file named
    before.
    """
    text = page.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"`([\w./]+/[\w.]+\.py)`", text):
        assert any((root / path).exists() for root in (ROOT, ROOT / "tests", ROOT / "tests" / "engine", *PACKAGES)), (
            path
        )
    file = None
    for path, test in re.findall(r"`([\w./]*)::(\w+)`", text):
        if path:
            file = ROOT / (path if path.startswith("tests/") else f"tests/engine/{path}")
        assert file is not None
        assert file.exists(), path
        assert re.search(rf"^(async )?def {test}\(", file.read_text(), re.MULTILINE), f"{path}::{test}"
