"""Copies weights of the next block to an accelerator while the current block computes.

A thread reads the values, and a stream of its own copies them, so that neither the CPU nor the stream that computes waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class CopiesAhead:
    """Copies values to an accelerator with streams (`device.has_streams`) before they are used. The reads are grouped by block."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = torch.get_device_module(device)
        self._stream = self._streams.Stream(device)
        self._thread = ThreadPoolExecutor(1, "copies ahead")
        self._copies: dict[str, dict[Any, Future[Any]]] = {}

    def start(self, block: str, reads: Mapping[Any, Callable[[], Any]]) -> None:
        """Begin the reads of a block, in their order. reads: functions that return a tensor on the device, or a tuple of tensors
        and None.
        """
        self._copies[block] = {key: self._thread.submit(self._copy, read) for key, read in reads.items()}

    def take(self, block: str, key: Any, read: Callable[[], T]) -> T:
        """Return the result of `read`, ready for use by the current stream. If `start` has begun this read for `block` under `key`,
        the device waits for the copy. Otherwise, or if the copy failed, for example for lack of memory, `read` is called now.
        """
        begun = self._copies.get(block, {}).pop(key, None)
        if begun is None or begun.exception() is not None:
            return read()
        made, copied = begun.result()
        current = self._streams.current_stream(self._device)
        current.wait_event(copied)
        for tensor in made if isinstance(made, tuple) else (made,):
            if tensor is not None:
                # Its memory belongs to the other stream, which must not reuse it before the current one has computed with it.
                tensor.record_stream(current)
        return made  # type: ignore[no-any-return]

    def keep(self, block: str = "") -> None:
        """Forget the reads that were begun, except those of `block`."""
        for name in self._copies.keys() - {block}:
            for begun in self._copies.pop(name).values():
                begun.cancel()

    def _copy(self, read: Callable[[], Any]) -> tuple[Any, Any]:
        with torch.no_grad(), self._streams.stream(self._stream):
            return read(), self._stream.record_event()
