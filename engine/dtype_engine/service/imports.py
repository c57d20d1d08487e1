"""Imports torch early in another thread: this import is the slowest step before the first metrics."""

from __future__ import annotations

import contextlib
import threading

_thread: threading.Thread | None = None


def begin_imports() -> None:
    """Import torch and the modules that use it in another thread. A failed import is reported when a model is opened."""
    global _thread
    _thread = threading.Thread(target=_import, name="dtype-engine-imports", daemon=True)
    _thread.start()


def finish_imports() -> None:
    """Wait for the imports. Call this before importing torch, which might otherwise be seen partly imported."""
    if _thread is not None:
        _thread.join()


def _import() -> None:
    with contextlib.suppress(ImportError):
        import dtype_engine.runtime.session.opening  # noqa: F401
