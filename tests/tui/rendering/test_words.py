"""The words of all sentences that users read: one for each thing, the field's own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import dtype_engine
import dtype_tui

OLD = re.compile(
    r"same top(?!-1)|takes \d+ tensors|[GM] params|up to that of q8_0|model is scanned|leaves with|puts? in force|opened lately"
    r"|quanti[s]",
    re.IGNORECASE,
)
"""For each of these there are better words, such as `matches 6 tensors`, `671 B params` and `recent`."""


def sentences() -> Iterator[tuple[Path, str]]:
    """The texts in the code of both packages, in files with old words, but docstrings, which users do not read."""
    for package in (dtype_engine, dtype_tui):
        for file in Path(str(package.__file__)).parent.rglob("*.py"):
            source = file.read_text()
            if not OLD.search(re.sub(r"""["']\s*[rf]*["']""", "", source)):
                continue  # in no text, be it one of several lines: it need not be parsed
            tree = ast.parse(source)
            docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                    yield file, node.value


def test_sentences_for_users_contain_no_outdated_words() -> None:
    assert [(file.name, text) for file, text in sentences() if OLD.search(text)] == []
