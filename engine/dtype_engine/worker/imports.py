"""torch and transformers, imported ahead of what needs them: they take longer than everything else before the first figure."""

from __future__ import annotations

import contextlib
import threading

_with_transformers = threading.Event()
_thread: threading.Thread | None = None


def begin_imports() -> None:
    """Import torch, and all of the engine that needs it, in a thread of its own. What can't be imported is reported by the opening
    of a model.
    """
    global _thread
    _thread = threading.Thread(target=_import, name="dtype-engine-imports", daemon=True)
    _thread.start()


def add_transformers() -> None:
    """The model is a checkpoint: what loads it is needed, too."""
    _with_transformers.set()


def finish_imports() -> None:
    """Wait for what `begin_imports` began: of two threads in one package's imports, one can see half a module."""
    if _thread is not None:
        _thread.join()


def _import() -> None:
    with contextlib.suppress(ImportError):
        from dtype_engine.runtime.session.opening import import_loaders

        if _with_transformers.is_set():
            import_loaders()
