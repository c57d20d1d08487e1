"""Reads the memory of this process from the operating system, in bytes."""

from __future__ import annotations

import dataclasses
import resource
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from dtype_engine.recipe import Plan
from dtype_engine.recipe.serving_memory import cache_change, default_context
from dtype_engine.results.memory import MemoryStats
from dtype_engine.runtime.device import allocated_bytes
from dtype_engine.runtime.model.live import LiveModel

_KIB = 1024
_ENTRY = 8
"""The size in bytes of an entry of /proc/self/pagemap."""
_PAGES_AT_ONCE = 1 << 20
"""How many entries are read at once."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The resident set of a process in bytes: what is in RAM. A value is None if the system does not report it."""

    rss: int
    anonymous: int | None
    """The part that is not backed by a file."""
    mapped: int | None
    """The part that is mapped from the checkpoint's files, which the system can reclaim."""
    peak_rss: int | None
    """The largest resident set since `reset_peak_rss`."""


def process_memory(files: Iterable[Path] = ()) -> ProcessMemory:
    """Return the current and peak resident memory of this process. files: the checkpoint's files, counted in `mapped`."""
    if not sys.platform.startswith("linux"):
        memory = psutil.Process().memory_info()
        return ProcessMemory(memory.rss, None, None, None)
    status = _status()
    return ProcessMemory(status["VmRSS"], status.get("RssAnon"), _mapped(files), status.get("VmHWM"))


def reset_peak_rss() -> None:
    """Reset the peak resident set to the current one on Linux, by writing 5 to /proc/self/clear_refs."""
    if sys.platform.startswith("linux"):
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def memory_stats(
    model: LiveModel, plan: Plan, kept_outputs: tuple[int, int] | None, limits: Mapping[str, int]
) -> MemoryStats:
    """Return the current number of bytes of a model's weights under a plan, of this process, and of the model's device.

    kept_outputs: (bytes of kept module outputs, the limit for them), or None if nothing was measured. limits: the maximum number of
    bytes that weights may take on a device, keyed by the device's name.
    """
    process = process_memory(model.files)
    kept, budget = kept_outputs or (None, None)
    allocated, reserved, peak = allocated_bytes(model.device)
    stats = MemoryStats(
        stored_bytes=plan.stored_bytes,
        planned_bytes=plan.planned_bytes,
        resident_bytes=model.resident_bytes,
        resident_by_device=tuple(model.resident_by_device().items()),
        limits=tuple(limits.items()),
        rss_bytes=process.rss,
        anonymous_bytes=process.anonymous,
        mapped_bytes=process.mapped,
        peak_rss_bytes=process.peak_rss,
        kept_bytes=kept,
        kept_budget_bytes=budget,
        read_bytes=None if not model.memory.limited or model.memory.keeps_pages else model.memory.bytes_read,
        device_allocated_bytes=allocated,
        device_reserved_bytes=reserved,
        device_peak_bytes=peak,
    )
    if not plan.caches:
        return stats
    context = default_context(model.tree)
    before, after = cache_change(model.tree, plan, context)
    return dataclasses.replace(
        stats,
        cache_stored_bytes=before,
        cache_planned_bytes=after,
        cache_context=context,
        cast_caches=len(plan.caches),
    )


def _status() -> dict[str, int]:
    sizes = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            sizes[name] = int(value.split()[0]) * _KIB
    return sizes


def _mapped(files: Iterable[Path]) -> int | None:
    """Return the number of resident bytes mapped from the given files, or None if the system does not report it.

    In /proc/self/maps, the line of a mapping begins with its addresses and ends with the path of its file. In /proc/self/pagemap,
    the highest bit of a page's entry says whether it is in RAM (see proc(5)). /proc/self/smaps has the number itself, but takes 3
    to 6 times as long to read, because the kernel then also counts the pages of every library.
    """
    wanted = {str(path.resolve()) for path in files}
    page, pages = resource.getpagesize(), 0
    try:
        with Path("/proc/self/pagemap").open("rb") as pagemap:
            for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
                addresses, *_, path = line.split(maxsplit=5)
                if path not in wanted:
                    continue
                first, end = (int(address, 16) // page for address in addresses.split("-"))
                pagemap.seek(first * _ENTRY)
                for start in range(first, end, _PAGES_AT_ONCE):
                    entries = bytearray(pagemap.read(_ENTRY * min(end - start, _PAGES_AT_ONCE)))
                    pages += int((torch.frombuffer(entries, dtype=torch.int64) < 0).sum())
    except (OSError, ValueError):  # ValueError: the mapping has just ended, so its entries could not be read
        return None
    return pages * page
