"""Work on blocks side by side, in threads that stay."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

import pytest
import torch
from tests.helpers import preloaded

from dtype_engine.core.errors import Cancelled
from dtype_engine.runtime.formats.row_blocks import parallel_map, stopping


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def work(numbers: Iterable[int]) -> tuple[int, int, list[int]]:
    time.sleep(0.01)
    return threading.get_ident(), torch.get_num_threads(), list(numbers)


def test_parallel_map_processes_every_block_once_in_reused_threads() -> None:
    together = threading.Barrier(3)  # a thread that is done early could take a second share

    def work_together(numbers: Iterable[int]) -> tuple[int, int, list[int]]:
        together.wait(60)
        return work(numbers)

    found = parallel_map(work_together, 13)
    assert [numbers for _, _, numbers in found] == [list(range(first, 13, 3)) for first in range(3)]
    assert {threads for _, threads, _ in found} == {1}
    assert torch.get_num_threads() == 3
    threads = {thread for thread, _, _ in found}
    assert len(threads) == 3
    assert threading.get_ident() in threads
    assert {thread for _ in range(5) for thread, _, _ in parallel_map(work_together, 13)} == threads


@pytest.mark.parametrize("count", [0, 1, 7])
def test_parallel_map_runs_few_blocks_in_the_calling_thread(count: int) -> None:
    found = parallel_map(work, count)
    assert [numbers for _, _, numbers in found] == ([list(range(count))] if count else [])
    assert {thread for thread, _, _ in found} <= {threading.get_ident()}


@pytest.mark.parametrize("failing", [0, 2])
def test_parallel_map_raises_an_error_after_all_threads_have_ended(failing: int) -> None:
    ended: list[int] = []

    def fails(numbers: Iterable[int]) -> None:
        first = min(numbers)
        if first == failing:
            raise ValueError("no such block")
        time.sleep(0.1)
        ended.append(first)

    with pytest.raises(ValueError, match="no such block"):
        parallel_map(fails, 12)
    assert sorted(ended) == sorted({0, 1, 2} - {failing})
    assert torch.get_num_threads() == 3


def test_cancelled_parallel_map_stops_before_the_next_block() -> None:
    done: list[int] = []

    def note(numbers: Iterable[int]) -> None:
        for number in numbers:
            done.append(number)
            time.sleep(0.01)

    with stopping(lambda: len(done) > 3), pytest.raises(Cancelled):
        parallel_map(note, 1200)
    assert len(done) < 10
    assert torch.get_num_threads() == 3
    done.clear()
    parallel_map(note, 12)  # what is outside of `stopping` runs on
    assert sorted(done) == list(range(12))


def test_nested_parallel_map_runs_in_one_thread() -> None:
    nested = parallel_map(lambda numbers: parallel_map(work, 12), 12)
    assert [[numbers for _, _, numbers in each] for each in nested] == [[list(range(12))]] * 3


_FORKS = """
import os, time, torch
from dtype_engine.runtime.formats.row_blocks import parallel_map
def work(numbers):
    time.sleep(0.05)
    return list(numbers)
torch.set_num_threads(3)
parallel_map(work, 12)
child = os.fork()
if not child:
    os._exit(parallel_map(work, 12) != [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]])
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_parallel_map_works_after_a_fork() -> None:
    assert preloaded.run(_FORKS).returncode == 0
