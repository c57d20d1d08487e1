"""Imports torch early in another thread, because the import takes longer than anything else before the first figure."""

from __future__ import annotations

import contextlib
import threading

_thread: threading.Thread | None = None


def begin_imports() -> None:
    """Import torch, and what needs it, in another thread. An import that fails is reported when a model is opened."""
    global _thread
    _thread = threading.Thread(target=_import, name="dtype-engine-imports", daemon=True)
    _thread.start()


def finish_imports() -> None:
    """Wait for the thread of `begin_imports`: if two threads import one package, one of them can see a partly imported module."""
    if _thread is not None:
        _thread.join()


def _import() -> None:
    with contextlib.suppress(ImportError):
        import dtype_engine.runtime.session.opening  # noqa: F401
