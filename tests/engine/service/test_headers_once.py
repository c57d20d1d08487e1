"""The start of the app without the screen: what is seen of a checkpoint at once and what is loaded come of one reading."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dtype_engine.checkpoint import safetensors_header, source
from dtype_engine.core.options import Options
from dtype_engine.service import events
from dtype_engine.service.worker import Worker


def test_first_tree_and_worker_read_the_headers_only_once(
    make_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    open_regular = safetensors_header.open_regular

    def counting(path: Path) -> object:
        reads.append(path)
        return open_regular(path)

    monkeypatch.setattr(safetensors_header, "open_regular", counting)
    model = source.locate(str(make_llama()))
    tree, whole = model.peek()
    assert tree is not None
    assert whole
    ready = threading.Event()

    def emit(event: events.Event) -> None:
        if isinstance(event, events.ModelReady | events.OpenFailed):
            ready.set()

    worker = Worker(model, Options(device="cpu"), emit)
    worker.start()
    assert ready.wait(240)
    worker.close()
    assert [path.name for path in reads] == ["model.safetensors"]
