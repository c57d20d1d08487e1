"""A Dask cluster on this machine gives the results of this process; lost work is repeated or reported."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.evaluation.conftest import results_with_one_killed, untimed
from tests.helpers import preloaded

import dtype_engine as de
from dtype_engine.checkpoint.source import Source
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.evaluation import cluster, work
from dtype_engine.evaluation.cluster import DaskPool
from dtype_engine.evaluation.specs import Opened
from dtype_engine.runtime.session import opening

pytestmark = pytest.mark.slow
Start = Callable[[int], tuple[str, list[subprocess.Popen[bytes]]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a scheduler and a number of workers and returns the address and the processes, the scheduler
    first.
    """
    distributed = pytest.importorskip("distributed")
    processes: list[subprocess.Popen[bytes]] = []

    def begin(module: str, *arguments: str) -> None:
        program = preloaded.command(f"from distributed.cli.{module} import main; main()")
        command = [*program, *arguments, "--no-dashboard"]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def started(workers: int) -> tuple[str, list[subprocess.Popen[bytes]]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        begin("dask_scheduler", "--host", "127.0.0.1", "--port", address.rpartition(":")[2])
        for _ in range(workers):
            folder = ("--local-directory", str(tmp_path / "dask"))
            begin("dask_worker", address, "--nthreads", "1", "--nworkers", "1", "--no-nanny", *folder)
        with distributed.Client(address, timeout=60, set_as_default=False) as client:
            if workers:
                client.wait_for_workers(workers, timeout=120)
        return address, processes

    yield started
    for process in processes:
        process.kill()
        process.wait()


def test_dask_cluster_with_a_killed_worker_gives_the_results_of_a_single_process(
    start: Start, session: Any, source: Source, options: de.Options, opened: Opened
) -> None:
    address, _ = start(2)
    recipes = [
        (de.Recipe((de.Rule.parse(rule),)), de.RunSettings()) for rule in ("*=bfloat16", "*.mlp=int8", "*=float16")
    ]
    with DaskPool(address) as pool:
        assert pool.workers == 2
        over = work.Over(pool, opened)
        for exact in (False, True):
            here = opening.open_session(source, options).scan(["int8"], exact=exact)
            there = work.scan(session, session.scan_task(["int8"], None, exact, None), over)
            assert untimed(there) == untimed(here)
        fresh = opening.open_session(source, options)
        here = {index: report.output for index, report in work.drifts(fresh, recipes, None)}
        assert {index: report.output for index, report in work.drifts(session, recipes, over)} == here
        found = results_with_one_killed(pool, opened, 40)
    scan = session.scan_task(["int8"], 2, False, None)
    assert all(found[index].value.scores == scan.measure(index % 5).scores for index in found)


def test_scan_keeps_finished_parts_when_the_dask_scheduler_ends(
    start: Start, session: Any, source: Source, options: de.Options, opened: Opened, tmp_path: Path
) -> None:
    address, processes = start(1)
    whole = opening.open_session(source, options).scan(["int8", "float16"], exact=True)
    file = tmp_path / "scan.json"
    task = session.scan_task(["int8", "float16"], None, True, file)

    def end(what: str, done: int, total: int | None) -> None:
        if done == 3:
            processes[0].kill()
            processes[0].wait()

    with (
        DaskPool(address) as pool,
        pytest.raises(de.UserError, match=f"the scheduler at {address} is gone; with --save"),
    ):
        work.scan(session, task, work.Over(pool, opened), end)
    again = opening.open_session(source, options).scan_task(["int8", "float16"], None, True, file)
    assert 3 <= len(again.done) < again.parts
    assert untimed(again.run()) == untimed(whole)


def test_missing_dask_scheduler_and_missing_workers_are_reported(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    address, _ = start(0)
    with pytest.raises(de.UserError, match=f"no workers; dtype-engine worker {address} says how"):
        DaskPool(address)
    assert run(cli, "dtype-engine", ["worker", address]) == 0
    assert f"dask worker {address} --nworkers 1" in capsys.readouterr().out
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(de.UserError, match=f"no Dask scheduler answers at {nobody}"):
        DaskPool(nobody)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"", r"no Dask scheduler answers at tcp://127.0.0.1:\d+ within 2 s"),
        (struct.pack("<Q", 2**60), "is no Dask scheduler, or one of another version: MemoryError"),
        (struct.pack("<QQ", 1, 2**62), "is no Dask scheduler, or one of another version: error: unpack_from"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no Dask scheduler, or one of another version"),
    ],
    ids=["nothing", "a length beyond memory", "a frame of one byte", "a web server"],
)
def test_server_that_is_no_dask_scheduler_is_reported(
    answer: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr(cluster, "_ANSWER_S", 2)
    accepted = []  # connections that stay open

    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(server.accept()[0])
                    accepted[-1].sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(de.UserError, match=says):
            DaskPool(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        server.shutdown(socket.SHUT_RDWR)
    for connection in accepted:
        connection.close()


def test_scheduler_that_is_silent_after_its_greeting_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    from distributed.comm import listen

    monkeypatch.setattr(cluster, "_CONNECT_S", 2)
    asked: list[str] = []

    async def handle(comm: Any) -> None:
        while True:
            asked.append((await comm.read())["op"])
            if asked == ["identity"]:
                await comm.write({"type": "Scheduler", "workers": {}})
            elif asked[-1] == "register-client":
                await comm.write([{"op": "stream-start"}])

    async def serve() -> None:
        async with listen("tcp://127.0.0.1:0", handle) as listener:
            address.put(listener.contact_address)
            await asyncio.to_thread(ended.wait, 60)

    address: queue.SimpleQueue[str] = queue.SimpleQueue()
    ended = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    with pytest.raises(de.UserError, match=r"no Dask scheduler answers at tcp://127.0.0.1:\d+ within 20 s"):
        DaskPool(address.get())
    assert asked.count("identity") >= 2  # the client asks for it every two seconds, too
    ended.set()
    thread.join(10)


@pytest.mark.parametrize("workers", ["0", "many"])
def test_workers_option_with_an_invalid_value_is_refused(workers: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "dtype-engine", ["scan", "--workers", workers]) == 2
    assert "give a number of processes from 1 to 9999, or tcp://HOST:PORT" in capsys.readouterr().err
