"""The hints in the engine's sentences: an option on the command line, a key in the app."""

from __future__ import annotations

import ast
import re
import typing
from pathlib import Path

import dtype_engine
from dtype_engine.core.errors import UserError
from dtype_engine.core.hints import ON_THE_COMMAND_LINE, HintName, hint
from dtype_tui.rendering.hint_keys import IN_THE_APP, with_keys

OPTION_WITH_A_KEY = re.compile(r"--(inputs|image|audio|chat|force)\b")
ENGINE = Path(dtype_engine.__file__).parent


def test_every_hint_in_errors_has_text_for_both_programs_and_is_used() -> None:
    names = set(typing.get_args(HintName))
    assert names == set(ON_THE_COMMAND_LINE) == set(IN_THE_APP)
    given = {
        name for path in ENGINE.rglob("*.py") for name in re.findall(r"\{hint\(['\"](.*?)['\"]\)\}", path.read_text())
    }
    assert given == names


def test_errors_shown_in_the_app_contain_no_command_line_options() -> None:
    shown = [ENGINE / "runtime/inputs", ENGINE / "runtime/export", ENGINE / "core/atomic_write.py"]
    files = [file for place in shown for file in (place.rglob("*.py") if place.is_dir() else [place])]
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        lists = {id(child) for node in ast.walk(tree) if isinstance(node, ast.Tuple) for child in node.elts}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents | lists:
                assert not OPTION_WITH_A_KEY.search(node.value), (path, node.value)


def test_hint_in_an_error_names_the_option_or_the_key() -> None:
    error = UserError(f"m takes no sounds; {hint('no-sound')}")
    assert str(error) == "m takes no sounds; leave --audio out"
    assert with_keys(error.sentence) == "m takes no sounds; leave the audio out (key i)"


def test_braces_in_errors_that_are_no_hint_are_kept() -> None:
    assert str(UserError("no file {hint:me}.pt or {0}")) == "no file {hint:me}.pt or {0}"
