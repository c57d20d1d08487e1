"""Reads how much memory this process may use: the machine's or, if it is less, that of a control group of Linux, as in a container
or a job of Slurm.

The files of control groups are described in https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
_VERSION_2 = "memory.max", "memory.current", ""
"""The names of a group's files with the limit and the used bytes, and the prefix of those names in `memory.stat` that include
subgroups.
"""


def total_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's memory, or the limit of a control group if it is less."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _limits())])


def free_memory() -> int:
    """Return the bytes of memory that are free for this process: those of the machine, or those of a control group if they are
    fewer. Memory that holds pages of files counts as free, because the system can drop these pages.
    """
    free = [max(0, limit - used) for limit, used in _limits()]
    return min([int(psutil.virtual_memory().available), *free])


def _limits() -> Iterator[tuple[int, int]]:
    """Yield the limits of the control groups to which this process belongs, and how much of them is used, in bytes."""
    for folder, (most, current, prefix) in _groups():
        try:
            limit = int((folder / most).read_text())
            used = int((folder / current).read_text())
            stat = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
            used -= sum(int(stat[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
        except (OSError, ValueError, KeyError):
            continue  # this group has no limit, or can't be read
        yield limit, used


def _groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folders of all control groups to which this process belongs, innermost first, and the names in them."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names, root = (_VERSION_1, _GROUPS / "memory") if controllers else (_VERSION_2, _GROUPS)
        # In a container the path may be that on the host, of which only the root is visible.
        folder = root / path.lstrip("/")
        for each in (folder, *folder.parents):
            if each.is_relative_to(root):
                yield each, names
