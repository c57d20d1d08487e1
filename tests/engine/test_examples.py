"""The examples in the docstrings of the public API run, on the demo with one short prompt."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path

import pytest

import dtype_engine as de
from dtype_engine.runtime.session.session import Session

FINDER = doctest.DocTestFinder(recurse=False, exclude_empty=True)


def documented() -> dict[str, object]:
    """Every public name of the package, and every public method and property of a session, by name."""
    names: dict[str, object] = {name: getattr(de, name) for name in de.__all__ if not name.startswith("_")}
    return names | {f"Session.{name}": value for name, value in inspect.getmembers(Session) if not name.startswith("_")}


def test_every_public_name_is_documented() -> None:
    assert {"open", "load_pretrained", "Session.cast", "Session.drift", "Session.plan"} <= documented().keys()
    assert [name for name, value in documented().items() if not inspect.getdoc(value)] == []


def test_docstring_examples_of_the_public_api_run(tmp_path: Path) -> None:
    options = de.Options(device="cpu", prompts=("The quick brown fox jumps over the lazy dog",))
    shared = de.open(options=options)
    tried: list[str] = []
    for name, value in documented().items():
        for example in FINDER.find(value, name, globs={"de": de, "session": shared, "folder": tmp_path}):
            shared.apply(de.Recipe())
            said: list[str] = []
            result = doctest.DocTestRunner().run(example, out=said.append)
            assert result.failed == 0, "".join(said)
            tried += [name] if result.attempted else []
    assert sorted(set(documented()) - set(tried)) == []


@pytest.mark.parametrize("name", [name for name in de.__all__ if name[0].isupper()])
def test_public_objects_have_a_docstring(name: str) -> None:
    assert len((getattr(de, name).__doc__ or "").split()) > 3
