"""How many workers there are, and which GPU each has."""

from __future__ import annotations

import multiprocessing

import psutil
import pytest
import torch

import dtype_engine as de
from dtype_engine.evaluation.pool import ProcessPool, assigned, visible_gpus
from dtype_engine.evaluation.workers import Workers, parse_workers


def test_visible_gpus_are_read_from_cuda_visible_devices() -> None:
    assert visible_gpus(3, {}) == ("0", "1", "2")
    assert visible_gpus(2, {"CUDA_VISIBLE_DEVICES": "5, 7"}) == ("5", "7")
    assert visible_gpus(1, {"CUDA_VISIBLE_DEVICES": "GPU-8932,GPU-17"}) == ("GPU-8932",)
    assert visible_gpus(0, {"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_worker_processes_get_their_own_gpus_in_turn() -> None:
    seen = []
    for index in range(5):
        environment = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "HOME": "/"}
        assigned(index, ("2", "GPU-17", "0"), environment)
        seen.append(environment["CUDA_VISIBLE_DEVICES"])
    assert seen == ["2", "GPU-17", "0", "2", "GPU-17"]  # one that takes the place of a killed one has that one's
    untouched = {"HOME": "/"}
    assigned(0, (), untouched)
    assert untouched == {"HOME": "/"}


def test_number_of_workers_is_limited_by_gpus_number_of_tasks_and_free_memory() -> None:
    said: list[str] = []
    with Workers(8, said.append) as workers:
        assert workers.pool(0, ("0", "1")).workers == 2
    assert said == ["2 workers of the 8 asked for: one for each GPU"]
    said.clear()
    with Workers(3, said.append, most=2) as workers:
        assert workers.pool(0).workers <= 2
    with Workers(4, said.append) as workers:
        assert workers.pool(psutil.virtual_memory().total).workers == 1
        assert workers.threads(8, 0) == 8
    assert said[-1] == "the memory that is free holds 1 worker of the 4 asked for"


@pytest.mark.parametrize("text", ["0", "-3", "many", "http://x", "10000", "99999999999", "1.5", ""])
def test_invalid_number_or_address_of_workers_is_refused(text: str) -> None:
    with pytest.raises(de.UserError, match="give a number of processes from 1 to 9999, or tcp://HOST:PORT"):
        parse_workers(text)
    assert [parse_workers(text) for text in ("1", "64", "tcp://10.0.0.1:8786")] == [1, 64, "tcp://10.0.0.1:8786"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="there is no GPU here")
def test_worker_process_sees_only_its_own_gpu() -> None:
    gpus = visible_gpus(torch.cuda.device_count())
    with ProcessPool(1, gpus) as pool:
        executor = pool._started()
        assert executor.submit(torch.cuda.device_count).result() == 1
    assert multiprocessing.active_children() == []
