"""A thread imports torch ahead: what opens a model waits for it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from dtype_engine.worker import imports

OPENING = "dtype_engine.runtime.session.opening"


@pytest.fixture(autouse=True)
def _as_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "_thread", None)


def test_what_a_model_needs_is_there_when_it_has_finished() -> None:
    begun = "import sys; from dtype_engine.worker import imports; imports.begin_imports(); imports.finish_imports()"
    subprocess.run([sys.executable, "-c", f"{begun}; assert {OPENING!r} in sys.modules"], check=True)


def test_what_can_not_be_imported_is_nobodys_error_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []
    monkeypatch.setattr(threading, "excepthook", heard.append)
    monkeypatch.setitem(sys.modules, OPENING, None)  # an ImportError
    imports.begin_imports()
    imports.finish_imports()
    assert not heard


def test_without_a_beginning_there_is_nothing_to_wait_for() -> None:
    imports.finish_imports()
