"""How much memory this process may use: the machine's or, if it is less, that of a control group of Linux, as in a container or a
job of Slurm. Also gives freed memory back.

The files of control groups are described in https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
_VERSION_2 = "memory.max", "memory.current", ""
"""A group's files with the limit and the used bytes, and the prefix of the entries in `memory.stat` that include subgroups."""
_sharing_processes = 1


def total_memory() -> int:
    """Return how many bytes of memory this process may use."""
    limits = (_number(folder / limit) for folder, (limit, _, _) in _groups())
    return min([int(psutil.virtual_memory().total), *(limit for limit in limits if limit is not None)])


def free_memory() -> int:
    """Return how many bytes are free for this process. Cached pages of files count as free, because the system can drop them."""
    free = int(psutil.virtual_memory().available)
    for folder, (limit, current, prefix) in _groups():
        most, used = _number(folder / limit), _number(folder / current)
        if most is not None and used is not None:
            free = min(free, max(0, most - used + _file_pages(folder / "memory.stat", prefix)))
    return free


def share_memory(processes: int) -> None:
    """Make `memory_budget` give each of `processes` processes an equal part."""
    global _sharing_processes
    _sharing_processes = processes


def memory_budget() -> int:
    """Return how many bytes this process may use for caches, whose contents can be computed again."""
    return free_memory() // 4 // _sharing_processes


def trim_heap() -> None:
    """Return freed memory to the system. glibc would otherwise keep up to 64 MiB for each thread."""
    if hasattr(psutil, "heap_trim"):  # psutil lacks it on systems whose C library is musl
        psutil.heap_trim()


def _number(file: Path) -> int | None:
    """Return the number in a file of a control group, or None if the file has no number but a word such as "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _file_pages(file: Path, prefix: str) -> int:
    """Return a control group's bytes of cached files from its `memory.stat`. prefix: the last value of `_VERSION_1` or
    `_VERSION_2`.
    """
    wanted = {f"{prefix}active_file", f"{prefix}inactive_file"}
    try:
        entries = (line.split() for line in file.read_text().splitlines())
        return sum(int(entry[1]) for entry in entries if len(entry) == 2 and entry[0] in wanted)
    except (OSError, ValueError):
        return 0


def _groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folders of the control groups to which this process may belong, and the names of their files. These are the
    process's own group, the groups around it, and the root group, which is the process's own in a container.
    """
    try:
        lines = _OWN_GROUPS.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in ("0::/", "0:memory:/", *lines):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        names, root = (_VERSION_1, _GROUPS / "memory") if controllers else (_VERSION_2, _GROUPS)
        # In a container the path may be that on the host, of which only the root is visible.
        folder = root / path.lstrip("/")
        for each in (folder, *folder.parents):
            if each.is_relative_to(root):
                yield each, names
