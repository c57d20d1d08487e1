"""A small checkpoint with five sequences of tokens, opened here and described for others."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dtype_engine as de
from dtype_engine.checkpoint.source import Source, locate
from dtype_engine.evaluation import work
from dtype_engine.evaluation.cluster import DaskPool
from dtype_engine.evaluation.pool import ProcessPool
from dtype_engine.evaluation.specs import Evaluated, Evaluation, Opened, ScanSequence


def untimed(report: Any) -> Any:
    """Return a scan report without what differs in every run: its times, and whether saved statistics were reused."""
    notices = tuple(each for each in report.notices if not each.startswith("calibration statistics"))
    return dataclasses.replace(report, forward_seconds=0.0, scan_seconds=0.0, notices=notices)


def results_with_one_killed(pool: ProcessPool | DaskPool, opened: Opened, count: int) -> dict[int, Evaluated]:
    """Return the results of repeated scans of five sequences, while the process that gave the first result is killed."""
    found: dict[int, Evaluated] = {}
    evaluations = [Evaluation(opened, ScanSequence(("int8",), 2, index % 5)) for index in range(count)]
    for index, result in pool.results(evaluations):
        if not found:
            os.kill(result.process, signal.SIGKILL)
        found[index] = result
    assert sorted(found) == list(range(count))
    assert len({result.process for result in found.values()}) > 1
    return found


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    from dtype_engine.runtime.formats.row_blocks import single_intraop_thread

    with single_intraop_thread():
        yield


@pytest.fixture
def source(make_llama: Callable[..., Path]) -> Source:
    return locate(str(make_llama(num_hidden_layers=1, dtype="bfloat16")))


@pytest.fixture
def options(tmp_path: Path) -> de.Options:
    import torch

    ids = torch.randint(0, 64, (5, 1, 8), generator=torch.Generator().manual_seed(1))
    torch.save([{"input_ids": row} for row in ids], tmp_path / "ids.pt")
    return de.Options(device="cpu", tensors=tmp_path / "ids.pt", threads=1)


@pytest.fixture
def session(source: Source, options: de.Options) -> Any:
    from dtype_engine.runtime.session import opening

    return opening.open_session(source, options)


@pytest.fixture
def opened(session: Any, source: Source) -> Opened:
    return work.opened_as(session, source, 1)
