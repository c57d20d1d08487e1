"""Streams for the fake accelerator. What a stream copies without blocking is NaN until somebody waits for its event."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.helpers.fake_accelerator import NAME, device

Copy = Callable[[], object]


class Stream(torch.Stream):
    """Keeps its copies until it has anything else to run, or until another stream waits for an event of it."""

    waits = True
    """False makes `wait_event` do nothing, as if it had been forgotten."""

    def __new__(cls, at: torch.device) -> Any:
        return super().__new__(cls, device=at)

    def __init__(self, at: torch.device) -> None:
        self.queued: list[Copy] = []
        self.events = 0

    def record_event(self, event: Any = None) -> Any:
        self.events += 1
        made, self.queued = self.queued, []
        return made

    def wait_event(self, event: Any) -> None:
        while event and Stream.waits:
            event.pop(0)()


@contextmanager
def streams(patch: pytest.MonkeyPatch) -> Iterator[list[Stream]]:
    """Give the fake accelerator streams, and the CPU pinned memory, in the `with` block. Yields the streams that are made."""
    made: list[Stream] = []
    here, own = threading.local(), Stream(torch.device(NAME))

    def make(at: torch.device) -> Stream:
        made.append(Stream(at))
        return made[-1]

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        here.stream = stream
        try:
            yield
        finally:
            here.stream = own

    def queued() -> list[Copy] | None:
        stream = getattr(here, "stream", own)
        return None if stream is own else stream.queued

    with patch.context() as patched:
        for name, value in {
            "Stream": make, "stream": entered, "current_stream": lambda at=None: getattr(here, "stream", own),
            "queued": queued, "lent": 0,
        }.items():  # fmt: skip
            patched.setattr(device, name, value, raising=False)
        patched.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
        yield made
