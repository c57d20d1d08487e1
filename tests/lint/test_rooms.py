"""The check finds readers of weights outside the room of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.lint.rooms import MOST_FILES, RUNTIME, main, names_visits, readers


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import mmap", "mmap"),
        ("from mmap import mmap", "mmap"),
        ("import os\nos.pread(file, 8, 0)", ".pread"),
        ("from os import path\npath.preadv", ".preadv"),
        ("from dtype_engine.runtime.formats import schemes", "dtype_engine.runtime.formats.schemes"),
        ("from dtype_engine.runtime.formats.schemes import decode", "dtype_engine.runtime.formats.schemes"),
        ("checkpoint.quantized['x']", ".quantized"),
        ("checkpoint.encoded", ".encoded"),
    ],
)
def test_lint_finds_code_that_reads_weights_outside_its_package(source: str, found: str) -> None:
    assert [what for _, what in readers(source)] == [found]


def test_lint_ignores_code_that_reads_no_weights() -> None:
    assert not list(readers("from dtype_engine.runtime.weights.files import read_range\nread_range(a, b, 0, 1)"))


def test_lint_finds_names_with_visit() -> None:
    assert names_visits("model.visits = 1")
    assert names_visits("def f(visited): pass")
    assert not names_visits('"""visits the blocks"""')


def test_lint_of_weights_exits_with_1_for_each_kind_of_finding(tmp_path: Path) -> None:
    room = tmp_path / RUNTIME
    (room / "weights").mkdir(parents=True)
    (room / "weights" / "files.py").write_text("import mmap")
    assert main(tmp_path) == 0
    (room / "other.py").write_text("import mmap")
    assert main(tmp_path) == 1
    (room / "other.py").write_text("")
    for number in range(MOST_FILES + 1):
        (room / f"v{number}.py").write_text("visits = 1")
    assert main(tmp_path) == 1
