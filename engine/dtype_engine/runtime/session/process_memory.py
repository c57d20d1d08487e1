"""Bytes of the process, as the system counts them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

_KIB = 1024


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """rss: resident set; anonymous: the part with no file behind it; mapped: the part mapped from the checkpoint's
    files, which the system can take back; peak_rss: the largest resident set since `reset_peak_rss`. None where the
    system does not report it."""

    rss: int
    anonymous: int | None
    mapped: int | None
    peak_rss: int | None


def process_memory(files: Iterable[Path] = ()) -> ProcessMemory:
    """What this process holds now. `files`: those of the checkpoint."""
    if not sys.platform.startswith("linux"):
        memory = psutil.Process().memory_info()
        return ProcessMemory(memory.rss, None, None, None)
    status = _status()
    return ProcessMemory(status["VmRSS"], status.get("RssAnon"), _mapped(files), status.get("VmHWM"))


def reset_peak_rss() -> None:
    """Start the peak resident set anew from what is resident now (Linux: writes 5 to /proc/self/clear_refs)."""
    if sys.platform.startswith("linux"):
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return


def reset_peaks(device: torch.device) -> None:
    """Start the peaks of the process and of a device anew."""
    reset_peak_rss()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _status() -> dict[str, int]:
    sizes = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            sizes[name] = int(value.split()[0]) * _KIB
    return sizes


def _mapped(files: Iterable[Path]) -> int:
    """Resident pages mapped from these files (proc(5), smaps: a line with the path heads each mapping)."""
    wanted = [re.escape(str(path.resolve()).encode()) for path in files]
    if not wanted:
        return 0
    # One search over the whole text: going line by line in Python takes tens of milliseconds.
    mappings = re.finditer(
        rb" (?:%s)\n(?:[A-Z]\w+: .*\n)*?Rss: +(\d+) kB" % b"|".join(wanted), Path("/proc/self/smaps").read_bytes()
    )
    return sum(int(mapping[1]) for mapping in mappings) * _KIB
