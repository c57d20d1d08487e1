"""A model's code that calls sys.exit has failed: it does not end whoever runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers import preloaded
from tests.helpers.recorded_worker import RecordedWorker
from torch import nn

import dtype_engine as de
from dtype_engine import Options
from dtype_engine.runtime.session.session import Session
from dtype_engine.service import events
from dtype_engine.service import opening as worker_opening
from dtype_engine.service.jobs import SPEED

CODE = """
import sys
import torch

{file}
class Leaving(torch.nn.Linear):
    def forward(self, x):
        {forward}
        return super().forward(x)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        {constructor}
        self.first, self.leaving = torch.nn.Linear(4, 4), Leaving(4, 4)
    def forward(self, x):
        return self.leaving(self.first(x))

def example_inputs():
    {inputs}
    return (torch.ones(1, 4),)
"""
PLACES = {
    "file": ("sys.exit(0)", "importing it failed: ExitCalled: the code called sys.exit(0)"),
    "constructor": ("sys.exit(3)", "calling Net() failed: ExitCalled: the code called sys.exit(3)"),
    "inputs": ("exit()", "example_inputs() of net.py:Net failed: ExitCalled: the code called sys.exit()"),
    "forward": ('raise SystemExit("bye")', "failed in leaving: ExitCalled: the code called sys.exit('bye')"),
}


def written(folder: Path, place: str, statement: str) -> str:
    (folder / "net.py").write_text(CODE.format_map(dict.fromkeys(PLACES, "pass") | {place: statement}))
    return f"{folder / 'net.py'}:Net"


@pytest.mark.parametrize("place", PLACES)
def test_sys_exit_in_model_code_exits_with_status_2(tmp_path: Path, place: str) -> None:
    statement, said = PLACES[place]
    done = preloaded.run(preloaded.COMMAND, "drift", written(tmp_path, place, statement), "--max-kl", "0.001")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


@pytest.mark.parametrize("place", PLACES)
def test_sys_exit_in_model_code_raises_a_user_error(tmp_path: Path, place: str) -> None:
    statement, said = PLACES[place]
    model = written(tmp_path, place, statement)
    with pytest.raises(de.UserError) as caught:
        de.open(model).drift()
    assert said in str(caught.value)


def test_sys_exit_while_importing_a_module_raises_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving_package.py").write_text("raise SystemExit(1)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(de.UserError, match="leaving_package: importing it failed"):
        de.open("leaving_package:Net")


class _LeavesBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> torch.Tensor:
        raise SystemExit(0)


class _Backwards(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _LeavesBackwards.apply(super().forward(x))
        return out


def test_sys_exit_in_a_backward_pass_is_reported_by_the_scan() -> None:
    with pytest.raises(de.NoForward, match="backward pass failed: the code called"):
        de.open(_Backwards(4, 4), inputs=torch.ones(1, 4)).scan()


def test_interrupt_in_model_code_stays_a_keyboard_interrupt(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        de.open(written(tmp_path, "forward", "raise KeyboardInterrupt")).drift()


def test_app_names_the_module_that_calls_sys_exit(tmp_path: Path) -> None:
    with RecordedWorker(written(tmp_path, "forward", "sys.exit(0)"), Options(device="cpu")) as recorded:
        failed = recorded.wait_for(events.Failed)
        assert "failed in leaving: ExitCalled" in failed.message
        recorded.wait_for(events.Idle)


def leave(*arguments: object, **named: object) -> None:
    raise SystemExit(0)


def test_engine_thread_survives_sys_exit_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "speed", leave)
    with RecordedWorker() as recorded:
        recorded.wait_for(events.Idle)
        for _ in range(2):
            start = len(recorded.events)
            recorded.worker.request(SPEED.ask(None))
            recorded.wait_for(events.Refused, since=start, seconds=60)
            recorded.wait_for(events.Idle, since=start, seconds=60)


def test_sys_exit_while_opening_a_model_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_opening, "_opened", leave)
    with RecordedWorker() as recorded:
        assert "the code called sys.exit(0)" in recorded.wait_for(events.OpenFailed, seconds=60).message
        recorded.wait_for(events.Idle, seconds=60)
