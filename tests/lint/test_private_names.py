"""The check finds what is private to another file, in every way that Python can reach it, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.lint.private_names import main, private_names


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from room import _key", "_key"),
        ("from room._door import key", "_door"),
        ("import room._door", "_door"),
        ("import room\nroom._key()", "_key"),
        ("class A(B):\n    def f(self):\n        return self._of_the_base", "_of_the_base"),
        ("getattr(model, '_plan', None)", "_plan"),
        ("other._mine = 1", "_mine"),
        ("vars(module)['_parameters']", "_parameters"),
        ("module.__dict__['_buffers']", "_buffers"),
    ],
)
def test_lint_finds_every_use_of_a_private_name(source: str, name: str) -> None:
    assert [found for _, found in private_names(source)] == [name]


@pytest.mark.parametrize(
    "source",
    [
        "from __future__ import annotations\nimport room\nroom.__name__",
        "class A:\n    def __init__(self):\n        self._mine = 1\n\ndef f(a):\n    return a._mine",
        "class A:\n    _mine: int = 1\n\ndef f(a):\n    return a._mine, a._replace(x=1)",
        "def _mine(): ...\n\n_mine()\nfor _, x in []: ...",
        "import os\nos._exit(1)",
    ],
)
def test_lint_ignores_own_and_documented_private_names(source: str) -> None:
    assert list(private_names(source)) == []


def test_lint_of_private_names_prints_file_and_line_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "engine" / "dtype_engine"
    package.mkdir(parents=True)
    (package / "room.py").write_text("import other\n\nother._door()\n")
    assert main(tmp_path) == 1
    assert capsys.readouterr().out == "engine/dtype_engine/room.py:3: _door is private to another file\n"
