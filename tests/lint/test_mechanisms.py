"""The check finds each mechanism that the project does without, and takes nothing else for one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.lint.mechanisms import PATCH, PATCHES, main, mechanisms


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import ctypes", "ctypes"),
        ("def f():\n    from ctypes.util import find_library", "ctypes"),
        ("from room import Door\nDoor.open = print", PATCH),
        ("import room.door\nroom.door.OPEN = True", PATCH),
        ("import room as house\ndel house.door", PATCH),
        ("from room import Door\nsetattr(Door, 'open', print)", PATCH),
        ("def f():\n    import room\n    before, room.OPEN = room.OPEN, True", PATCH),
        ("made = type('Name', (Base,), {})", "a class made by type()"),
        ("vars(module)['_parameters']", 'a subscript ["_parameters"]'),
    ],
)
def test_lint_finds_each_unwanted_mechanism(source: str, found: str) -> None:
    assert [what for _, what in mechanisms(source)] == [found]


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys.stdout = open('x')",
        "from dtype_engine.results import Report\nReport.__repr__ = str",
        "from room import Door\ndoor = Door()\ndoor.open = True\nprint(Door.open)",
        "type(value)",
        "module._parameters['weight']",
    ],
)
def test_lint_of_mechanisms_accepts_code_without_patches_or_private_names(source: str) -> None:
    assert list(mechanisms(source)) == []


def test_lint_of_mechanisms_prints_file_and_line_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("engine/dtype_engine/room.py", PATCHES):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text("import other\n\nother.door = 1\n")
    assert main(tmp_path) == 1
    assert capsys.readouterr().out == f"engine/dtype_engine/room.py:3: {PATCH}\n"
