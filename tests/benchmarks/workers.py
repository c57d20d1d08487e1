"""Several processes beside one: how much faster, what one alone costs, and what several hold of one checkpoint."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .rows import Row

_REPEATS = 5


def workers(folder: Path) -> list[Row]:
    """An exact scan by two processes, by one, and in this one, each with one thread; memory of four on one checkpoint."""
    from dtype_engine.runtime.formats.row_blocks import single_intraop_thread

    with single_intraop_thread():
        return [*_scans(small(folder.parent / "small")), *_memory(folder)]


def small(folder: Path) -> Path:
    """A Llama of 30 MiB: a pass takes a tenth of a second."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2000, hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=6,
        tie_word_embeddings=True, max_position_embeddings=1024,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@contextmanager
def open_workers(folder: Path, count: int, sequences: int) -> Iterator[tuple[Any, Any]]:
    """A session here, and who evaluates beside it, with the model open in every process."""
    import torch

    import dtype_engine as de
    from dtype_engine.checkpoint.source import locate
    from dtype_engine.evaluation.pool import ProcessPool
    from dtype_engine.evaluation.specs import Evaluation, ScanSequence
    from dtype_engine.evaluation.work import Over, opened_as
    from dtype_engine.runtime.session.opening import open_session

    ids = torch.randint(0, 2000, (sequences, 1, 256), generator=torch.Generator().manual_seed(1))
    torch.save([{"input_ids": row} for row in ids], folder.parent / "ids.pt")
    source = locate(str(folder))
    session = open_session(source, de.Options(device="cpu", tensors=folder.parent / "ids.pt", threads=1))
    with ProcessPool(count) as pool:
        over = Over(pool, opened_as(session, source, 1))
        processes: set[int] = set()
        while len(processes) < count:
            tasks = [
                Evaluation(over.opened, ScanSequence(("int8",), 1, index % sequences)) for index in range(4 * count)
            ]
            processes |= {result.process for _, result in pool.results(tasks)}
        yield session, over


def _exact(session: Any, over: Any) -> float:
    """Return the seconds of a whole exact scan in a session, or over processes."""
    from dtype_engine.evaluation import work
    from dtype_engine.runtime.scan.exact import ExactScan

    task = ExactScan(session.model, session.inputs, ("int8",), session.settings)
    started = time.perf_counter()
    if over is None:
        with session.putting_back():
            task.run()
    else:
        work.scan(session, task, over)
    return time.perf_counter() - started


def _scans(folder: Path) -> list[Row]:
    import psutil

    faster, beside, busy = [], [], []
    with open_workers(folder, 1, 2) as (_, one), open_workers(folder, 2, 2) as (session, two):
        for over in (None, one, two):
            _exact(session, over)

        def cpu(over: Any) -> float:
            """Seconds of processor that the processes have had."""
            return sum(sum(psutil.Process(number).cpu_times()[:2]) for number in _processes(over))

        for _ in range(_REPEATS):
            here, before = _exact(session, None), cpu(one)
            alone, between = _exact(session, one), cpu(two)
            both = _exact(session, two)
            faster.append(alone / both)
            beside.append(alone / here)
            busy.append((cpu(two) - between) / (cpu(one) - before))
    return [
        Row("exact scan: 2 workers of one thread, times as fast as 1", statistics.median(faster), "x", least=1.7),
        Row("the same: processor time of 2 workers / of 1", statistics.median(busy), "x", 1.2),
        Row("exact scan: 1 worker / in this process, model open in both", statistics.median(beside), "x", 1.1),
    ]


def _processes(over: Any) -> set[int]:
    """The numbers of a pool's processes."""
    from dtype_engine.evaluation.specs import Evaluation, ScanSequence

    task = Evaluation(over.opened, ScanSequence(("int8",), 1, 0))
    found: set[int] = set()
    while len(found) < over.pool.workers:
        found |= {result.process for _, result in over.pool.results([task] * (2 * over.pool.workers))}
    return found


def _memory(folder: Path) -> list[Row]:
    """What processes hold after a scan, in proportional shares (Pss: a page that several have counts once in all)."""
    import os

    file = folder / "model.safetensors"
    model = file.stat().st_size
    with open_workers(folder, 1, 4) as (session, over):
        _scan(session, over)
        (number,) = _processes(over)
        whole, mapped = _shares(number, file)
        private = whole - mapped
    with open_workers(folder, 4, 4) as (session, over):
        _scan(session, over)
        shares = [_shares(number, file) for number in _processes(over)]
        held = sum(whole for whole, _ in shares) + _shares(os.getpid(), file)[1]  # this process has the same pages
    return [
        Row("the checkpoint", model / 2**20, "MiB"),
        Row("private part of a worker after a scan", private / 2**20, "MiB"),
        Row("4 workers on one checkpoint: memory / (1.2 x model + 4 x private part)", held / (1.2 * model + 4 * private), "x", 1),
        Row("the same without sharing, for comparison: 4 x (model + private part) / that",
            4 * (model + private) / (1.2 * model + 4 * private), "x"),
    ]  # fmt: skip


def _scan(session: Any, over: Any) -> None:
    """A scan of all sequences, which reads every weight."""
    from dtype_engine.evaluation import work
    from dtype_engine.runtime.scan.scan import Scan

    work.scan(session, Scan(session.model, session.inputs, ("int8",), draws=1), over)


def _shares(number: int, file: Path) -> tuple[int, int]:
    """Return the bytes of a process, and those mapped from `file`, in proportional shares (proc(5), smaps)."""
    text = Path(f"/proc/{number}/smaps").read_text()
    whole = sum(map(int, re.findall(r"^Pss: +(\d+) kB", text, re.MULTILINE)))
    mapped = re.findall(rf" {re.escape(str(file.resolve()))}\n(?:[A-Z]\w+: .*\n)*?Pss: +(\d+) kB", text)
    return whole << 10, sum(map(int, mapped)) << 10
