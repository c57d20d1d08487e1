"""How long a scan takes over many workers, simulated; and the simulation against runs: `python -m tests.benchmarks simulated`.

`python -m tests.benchmarks.simulated` prints the table of engine/docs/many-workers.md.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .rows import Row


@dataclass(frozen=True)
class Cluster:
    """workers, and how many of them share a node; processors of a node; opening: seconds of processor until a worker has the model
    open; node_read: bytes of the checkpoint that every node reads once, at `shared_rate` bytes a second of the storage that all
    nodes share, and `node_rate` of a node at most; slow: node -> how many times as long everything takes there; lost: the worker
    that ends, and when, in seconds.
    """

    workers: int
    per_node: int = 1
    processors: float = 1.0
    opening: float = 0.0
    node_read: float = 0.0
    shared_rate: float = 1.0
    node_rate: float = 1.0
    slow: tuple[tuple[int, float], ...] = ()
    lost: tuple[int, float] | None = None


@dataclass(frozen=True)
class Outcome:
    """Seconds until the last result, and until the first; idle: share of the workers' time after the opening in which they wait."""

    seconds: float
    first: float
    idle: float


def simulate(cluster: Cluster, parts: Sequence[float]) -> Outcome:
    """Give parts (seconds of one processor each) to workers as these are free, in order.

    A node's workers share its processors: each goes at `processors / workers there`, one at most. What a lost worker was at is done
    again by the next that is free.
    """
    nodes = -(-cluster.workers // cluster.per_node)
    slow = dict(cluster.slow)
    read = max(cluster.node_read * nodes / cluster.shared_rate, cluster.node_read / cluster.node_rate)
    paces = []
    for worker in range(cluster.workers):
        node = worker // cluster.per_node
        there = min(cluster.per_node, cluster.workers - node * cluster.per_node)
        paces.append(slow.get(node, 1.0) / min(1.0, cluster.processors / there))
    free = [(read + cluster.opening * paces[worker], worker) for worker in range(cluster.workers)]
    opened = [when for when, _ in sorted(free, key=lambda each: each[1])]
    heapq.heapify(free)
    waiting = list(parts)[::-1]
    ends: list[float] = []
    busy = 0.0
    while waiting:
        when, worker = heapq.heappop(free)
        part = waiting.pop()
        end = when + part * paces[worker]
        if cluster.lost is not None and worker == cluster.lost[0] and end > cluster.lost[1]:
            waiting.append(part)
            continue  # and it does not come back
        busy += end - when
        ends.append(end)
        heapq.heappush(free, (end, worker))
    last = max(ends)
    return Outcome(last, min(ends), 1 - busy / sum(last - when for when in opened))


def simulated(folder: Path) -> list[Row]:
    """Runs with 1, 2 and 4 workers beside the simulation of each: it is given the time of the opening and of a part in one
    process alone, and the number of processors.
    """
    import os
    import statistics
    import time

    from dtype_engine.evaluation.pool import ProcessPool
    from dtype_engine.evaluation.specs import Evaluation, ScanSequence
    from dtype_engine.runtime.formats.row_blocks import single_intraop_thread
    from dtype_engine.runtime.scan.scan import Scan

    from .workers import open_workers, small

    with single_intraop_thread(), open_workers(small(folder.parent / "small"), 1, 12) as (session, over):
        scan = Scan(session.model, session.inputs, ("int8",), draws=8)
        evaluations = [Evaluation(over.opened, ScanSequence(scan.dtypes, 8, index)) for index in scan.pending()]
        alone = [result.seconds for _, result in over.pool.results(evaluations)]
        openings = []
        for _ in range(3):
            with ProcessPool(1) as pool:
                started = time.perf_counter()
                ((_, result),) = pool.results(evaluations[:1])
                openings.append(time.perf_counter() - started - result.seconds)
        opening = statistics.median(openings)
        rows = [
            Row("opening of a worker alone", opening, "s"),
            Row("a part in a worker alone", statistics.mean(alone), "s"),
        ]
        for count in (1, 2, 4):
            ratios = []
            expected = simulate(Cluster(count, count, os.cpu_count() or 1, opening), alone).seconds
            for _ in range(3):
                with ProcessPool(count) as pool:
                    started = time.perf_counter()
                    list(pool.results(evaluations))
                    ratios.append(expected / (time.perf_counter() - started))
            what = f"{len(alone)} parts by {count} workers from their start on: simulated / measured"
            least = 0.8 if count <= (os.cpu_count() or 1) else 0.7  # what taking turns costs is not simulated
            rows.append(Row(what, statistics.median(ratios), "x", 1.25, least))
    return rows


def main() -> None:
    """A scan of 256 sequences of a model of 70 B parameters; see the page for what is assumed."""
    chance = random.Random(1)
    nbytes = 141e9
    part = 24 * 60.0
    parts = [part * chance.lognormvariate(0, 0.1) for _ in range(256)]
    nodes = {
        "per_node": 4,
        "processors": 4.0,
        "opening": 30.0,
        "node_read": nbytes,
        "shared_rate": 20e9,
        "node_rate": 5e9,
    }
    rows = {
        "1 worker": Cluster(1, **nodes),  # type: ignore[arg-type]
        "16 workers on 4 nodes": Cluster(16, **nodes),  # type: ignore[arg-type]
        "64 workers on 16 nodes": Cluster(64, **nodes),  # type: ignore[arg-type]
        "the same from storage of 2 GB/s": Cluster(64, **nodes | {"shared_rate": 2e9}),  # type: ignore[arg-type]
        "the same, a node takes 1.5 times as long": Cluster(64, **nodes, slow=((3, 1.5),)),  # type: ignore[arg-type]
        "the same, a worker ends after an hour": Cluster(64, **nodes, lost=(17, 3600.0)),  # type: ignore[arg-type]
        "256 workers on 64 nodes": Cluster(256, **nodes),  # type: ignore[arg-type]
    }
    one = simulate(rows["1 worker"], parts).seconds
    print("| workers | hours | times as fast | first estimate, min | workers wait |\n|---|---|---|---|---|")
    for name, cluster in rows.items():
        found = simulate(cluster, parts)
        print(
            f"| {name} | {found.seconds / 3600:.2f} | {one / found.seconds:.1f} | {found.first / 60:.0f} | {found.idle:.0%} |"
        )


if __name__ == "__main__":
    main()
