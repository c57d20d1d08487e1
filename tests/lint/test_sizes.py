"""The check finds functions, signatures and classes over its limits, and leaves out declarations of options."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.lint.sizes import main, too_large


def function(lines: int = 2, parameters: int = 0, decorator: str = "", name: str = "f") -> str:
    given = ", ".join(f"p{number}" for number in range(parameters))
    return f"{decorator}\ndef {name}({given}):\n" + "    pass\n" * (lines - 1)


def class_of(annotated: int, assigned: int = 0, name: str = "C") -> str:
    fields = "".join(f"    a{number}: int = 0\n" for number in range(annotated))
    values = "".join(f"        self.b{number} = 0\n" for number in range(assigned))
    return f"class {name}:\n    x = 1\n{fields}    def __init__(self):\n        self.a0 = 1\n{values}"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (function(lines=61), "f has 61 lines, more than 60"),
        (function(parameters=9), "f has 9 parameters, more than 8"),
        ("class C:\n    async def f(self, a, b, /, c, d, *e, g, h, i, **j): ...", "f has 9 parameters, more than 8"),
        (class_of(annotated=21), "C has 21 fields, more than 20"),
        (class_of(annotated=11, assigned=10), "C has 21 fields, more than 20"),
        (function(lines=61, decorator="@cached"), "f has 61 lines, more than 60"),
    ],
)
def test_lint_finds_code_over_a_size_limit(source: str, sentence: str) -> None:
    assert [found for _, found in too_large(source)] == [sentence]


@pytest.mark.parametrize(
    "source",
    [
        function(lines=60, parameters=8),
        "class C:\n    def f(self, a, b, c, d, e, f, g, h): ...",
        function(lines=90, parameters=12, decorator="@click.command"),
        function(lines=90, parameters=12, decorator='@recipe.command(cls=Command, name="new")'),
        class_of(annotated=10, assigned=10),
        class_of(annotated=30, name="OutputDrift"),
    ],
)
def test_lint_ignores_code_within_the_size_limits_and_exceptions(source: str) -> None:
    assert list(too_large(source)) == []


def test_lint_of_sizes_prints_file_line_and_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "room.py").write_text("x = 1\n" + function(parameters=9).lstrip())
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{tmp_path}/room.py:2: f has 9 parameters, more than 8\n"


def test_lint_of_sizes_exits_with_0_without_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "room.py").write_text(function())
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
