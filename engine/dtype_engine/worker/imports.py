"""torch, imported ahead of what needs it: it takes longer than everything else before the first figure."""

from __future__ import annotations

import contextlib
import threading

_thread: threading.Thread | None = None


def begin_imports() -> None:
    """Import torch, and all of the engine that needs it, in a thread of its own. What can't be imported is reported by the opening
    of a model.
    """
    global _thread
    _thread = threading.Thread(target=_import, name="dtype-engine-imports", daemon=True)
    _thread.start()


def finish_imports() -> None:
    """Wait for what `begin_imports` began: of two threads in one package's imports, one can see half a module."""
    if _thread is not None:
        _thread.join()


def _import() -> None:
    with contextlib.suppress(ImportError):
        import dtype_engine.runtime.session.opening  # noqa: F401
