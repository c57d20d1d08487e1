"""Which command lines start an engine before anything else of them is parsed."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from dtype_engine.service.stdio import NICENESS
from dtype_tui.process import early_engine

PROCESS = 4321


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of the commands that would have been started."""
    commands: list[Any] = []

    def start(command: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(pid=PROCESS)

    def lower(kind: int, process: int, niceness: int) -> None:
        assert (kind, process, niceness) == (os.PRIO_PROCESS, PROCESS, NICENESS)

    monkeypatch.setattr(os, "setpriority", lower)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: start(command))
    monkeypatch.setattr(early_engine, "_process", None)
    return commands


@pytest.mark.parametrize(
    "line",
    [
        "--help", "-h", "demo --help", "--version", "serve", "serve demo --port 80", "demo --in-process", "--in-process",
        "ssh://host/srv/model", "--cast *=bf16 ssh://me@host:22/srv/model", "demo --engine-command docker",
        "demo --engine-command=docker",
    ],
)  # fmt: skip
def test_engine_is_not_started_early_without_a_local_model(line: str, started: list[Any]) -> None:
    early_engine.start_early(line.split())
    assert not started
    assert early_engine.take() is None


@pytest.mark.parametrize("line", ["", "demo", "--resume", "/srv/serve", "demo --cast *=bf16", "./ssh", "-- serve"])
def test_engine_of_a_local_model_is_started_early_only_once(line: str, started: list[Any]) -> None:
    early_engine.start_early(line.split())
    assert len(started) == 1
    assert early_engine.take() is not None
    assert early_engine.take() is None
