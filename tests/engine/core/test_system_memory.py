"""The memory of a process in a control group, as a container or a job of Slurm sets its limits."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from dtype_engine.core import system_memory
from dtype_engine.core.system_memory import memory_budget

MIB = 1 << 20


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(system_memory, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(system_memory, "_OWN_GROUPS", tmp_path / "own")
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")


def in_version_2(groups: Path, inside: str, visible: str) -> None:
    (groups / "own").write_text(f"0::{inside}\n")
    write(groups / "cgroup" / visible, max=str(64 * MIB), current=str(40 * MIB),
          stat=f"anon 1\ninactive_file {10 * MIB}\nactive_file {5 * MIB}")  # fmt: skip


@pytest.mark.parametrize(("inside", "visible"), [("/", ""), ("/slurm/job_7", "slurm/job_7"), ("/docker/0123", "")])
def test_cgroup_v2_limit_and_free_memory_are_read(groups: Path, inside: str, visible: str) -> None:
    in_version_2(groups, inside, visible)
    assert system_memory.total_memory() == 64 * MIB
    assert system_memory.free_memory() == (64 - 40 + 15) * MIB
    assert memory_budget() == system_memory.free_memory() // 4


def test_smallest_memory_limit_of_nested_cgroups_is_used(groups: Path) -> None:
    in_version_2(groups, "/slurm/job_7/step_0", "slurm")
    write(
        groups / "cgroup/slurm/job_7", max=str(128 * MIB), current=str(127 * MIB), stat="inactive_file 0\nactive_file 0"
    )
    write(groups / "cgroup/slurm/job_7/step_0", max="max", current=str(MIB), stat="inactive_file 0\nactive_file 0")
    assert system_memory.total_memory() == 64 * MIB
    assert system_memory.free_memory() == MIB


def test_free_memory_in_cgroup_v1_counts_the_cache_of_child_groups(groups: Path) -> None:
    (groups / "own").write_text("5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n")
    write(groups / "cgroup/memory/a/b", limit_in_bytes=str(32 * MIB), usage_in_bytes=str(30 * MIB),
          stat=f"inactive_file 0\nactive_file 0\ntotal_inactive_file {3 * MIB}\ntotal_active_file {4 * MIB}")  # fmt: skip
    assert system_memory.total_memory() == 32 * MIB
    assert system_memory.free_memory() == 9 * MIB


def test_cgroup_limit_is_used_without_usage_statistics(groups: Path) -> None:
    write(groups / "cgroup", max=str(64 * MIB))
    assert system_memory.total_memory() == 64 * MIB
    assert system_memory.free_memory() > 0
    write(groups / "cgroup/memory", limit_in_bytes=str(32 * MIB), usage_in_bytes=str(30 * MIB), stat="cache 5\n\nodd")
    assert (system_memory.total_memory(), system_memory.free_memory()) == (32 * MIB, 2 * MIB)


def test_malformed_cgroup_lines_are_ignored(groups: Path) -> None:
    (groups / "own").write_bytes(b"\nodd\n3:memory\n0::/a\xff:b\n")
    write(groups / "cgroup", max=str(64 * MIB), current="0", stat="")
    assert system_memory.total_memory() == 64 * MIB


def test_without_cgroup_limits_all_memory_of_the_machine_is_used(groups: Path) -> None:
    assert system_memory.total_memory() == psutil.virtual_memory().total
    (groups / "own").write_text("0::/a\n")
    write(groups / "cgroup/a", max="max", current="5", stat="inactive_file 0\nactive_file 0")
    assert system_memory.total_memory() == psutil.virtual_memory().total
    assert 0 < system_memory.free_memory() <= psutil.virtual_memory().total
