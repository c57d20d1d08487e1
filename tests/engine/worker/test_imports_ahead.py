"""A thread imports torch ahead, and transformers for a checkpoint: what opens a model waits for it."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

import pytest

from dtype_engine.worker import imports

OPENING = "dtype_engine.runtime.session.opening"


@pytest.fixture(autouse=True)
def _as_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "_thread", None)
    monkeypatch.setattr(imports, "_with_transformers", threading.Event())


@pytest.mark.parametrize("is_checkpoint", [True, False])
def test_what_a_model_needs_is_there_when_it_has_finished(is_checkpoint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    opening = ModuleType(OPENING)
    vars(opening)["import_loaders"] = lambda: loaded.append("transformers")
    monkeypatch.setitem(sys.modules, OPENING, opening)
    if is_checkpoint:
        imports.add_transformers()
    imports.begin_imports()
    imports.finish_imports()
    assert loaded == ["transformers"] * is_checkpoint


def test_what_can_not_be_imported_is_nobodys_error_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []
    monkeypatch.setattr(threading, "excepthook", heard.append)
    monkeypatch.setitem(sys.modules, OPENING, None)  # an ImportError
    imports.begin_imports()
    imports.finish_imports()
    assert not heard


def test_without_a_beginning_there_is_nothing_to_wait_for() -> None:
    imports.finish_imports()
