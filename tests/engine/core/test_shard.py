"""Every part of the work is in exactly one shard, and shards can be chosen by a Slurm job array."""

from __future__ import annotations

import pytest

from dtype_engine.core.errors import UserError
from dtype_engine.core.shard import WHOLE, Shard


@pytest.mark.parametrize(("parts", "count"), [(1, 1), (7, 3), (16, 16), (3, 5), (0, 2)])
def test_every_part_is_in_exactly_one_shard(parts: int, count: int) -> None:
    shares = [Shard(number, count).of(range(parts)) for number in range(1, count + 1)]
    assert sorted(part for share in shares for part in share) == list(range(parts))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert list(WHOLE.of(range(parts))) == list(range(parts))


@pytest.mark.parametrize("text", ["", "3", "0/3", "4/3", "1/0", "-1/3", "a/b", "1/3/5", "1/1000000000"])
def test_invalid_shard_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="write 3/16"):
        Shard.parse(text, {})


def slurm(task: int, first: int, step: int, count: int) -> dict[str, str]:
    figures = {"ID": task, "MIN": first, "STEP": step, "COUNT": count}
    return {f"SLURM_ARRAY_TASK_{name}": str(figure) for name, figure in figures.items()}


@pytest.mark.parametrize(
    ("environment", "share"),
    [(slurm(0, 0, 1, 16), "1/16"), (slurm(3, 1, 1, 3), "3/3"), (slurm(7, 1, 2, 4), "4/4"), (slurm(5, 5, 1, 1), "1/1")],
)
def test_slurm_array_may_start_at_any_index(environment: dict[str, str], share: str) -> None:
    assert str(Shard.parse("slurm", environment)) == share


@pytest.mark.parametrize("environment", [{}, {"SLURM_ARRAY_TASK_ID": "3"}, slurm(3, 0, 0, 4), slurm(9, 0, 1, 4)])
def test_slurm_shard_outside_a_job_array_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(UserError, match="--shard slurm: SLURM_ARRAY_TASK_ID"):
        Shard.parse("slurm", environment)
