"""A thread imports torch ahead: what opens a model waits for it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from dtype_engine.service import imports

OPENING = "dtype_engine.runtime.session.opening"


@pytest.fixture(autouse=True)
def _as_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "_thread", None)


def test_background_import_is_complete_after_finish_imports() -> None:
    begun = "import sys; from dtype_engine.service import imports; imports.begin_imports(); imports.finish_imports()"
    subprocess.run([sys.executable, "-c", f"{begun}; assert {OPENING!r} in sys.modules"], check=True)


def test_failed_background_import_raises_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []
    monkeypatch.setattr(threading, "excepthook", heard.append)
    monkeypatch.setitem(sys.modules, OPENING, None)  # an ImportError
    imports.begin_imports()
    imports.finish_imports()
    assert not heard


def test_finish_imports_returns_without_a_background_import() -> None:
    imports.finish_imports()
