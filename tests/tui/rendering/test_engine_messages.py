"""The engine's sentences in the app: a key where the command line has an option."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import dtype_engine.runtime
from dtype_tui.rendering.engine_messages import in_the_app

OPTIONS_WITH_A_KEY = re.compile(r"--(inputs|image|audio|force)\b")


def sentences() -> Iterator[str]:
    """Every piece of text of more than one word in the rooms whose refusals the app shows, docstrings aside."""
    root = Path(dtype_engine.runtime.__file__).parent
    for path in (*root.glob("inputs/*.py"), *root.glob("export/*.py")):
        tree = ast.parse(path.read_text())
        documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
                yield node.value


def test_no_sentence_names_an_option_that_a_key_stands_for() -> None:
    naming = [sentence for sentence in sentences() if OPTIONS_WITH_A_KEY.search(sentence)]
    assert len(naming) >= 8
    for sentence in naming:
        assert not OPTIONS_WITH_A_KEY.search(in_the_app(sentence)), sentence


def test_the_key_is_named_instead() -> None:
    assert in_the_app("m takes no sounds; leave --audio out") == "m takes no sounds; leave the sound out (key i)"
    assert "with the key i" in in_the_app("Give tensors with --inputs, or write a function example_inputs()")
