"""Splits work into shares that run independently, such as the tasks of a Slurm job array."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dtype_engine.core.errors import UserError
from dtype_engine.core.number_ranges import Positive
from dtype_engine.core.text import printable

T = TypeVar("T")
_SLURM = "SLURM_ARRAY_TASK_"


@dataclass(frozen=True, slots=True)
class Shard:
    """The share `number`, counted from 1, of the `count` shares into which work is split."""

    number: Positive
    count: Positive

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str]) -> Shard:
        """Parse a shard such as `3/16`, or `slurm` for this task of a Slurm job array, which `environment` describes. Raises
        UserError.
        """
        if text == "slurm":
            return cls._of_slurm(environment)
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        shard = cls(int(found[1]), int(found[2])) if found else None
        if shard is None or not 1 <= shard.number <= shard.count:
            raise UserError(
                f"--shard {printable(text, 40)}: write 3/16 for the third of sixteen, or slurm in a Slurm job array"
            )
        return shard

    @classmethod
    def _of_slurm(cls, environment: Mapping[str, str]) -> Shard:
        try:
            task, first, step, count = (int(environment[_SLURM + name]) for name in ("ID", "MIN", "STEP", "COUNT"))
            number = (task - first) // step + 1
        except (KeyError, ValueError, ZeroDivisionError):
            raise UserError(
                f"--shard slurm: {_SLURM}ID, _MIN, _STEP and _COUNT are not all set; start it by sbatch --array, or write 3/16"
            ) from None
        if not 1 <= number <= count:
            raise UserError(f"--shard slurm: {_SLURM}ID {task} is not one of the {count} tasks that begin with {first}")
        return cls(number, count)

    def of(self, parts: Sequence[T]) -> Sequence[T]:
        """Return every `count`-th item of `parts`, beginning with item `number` (from 1). Neighboring items take similar time, so
        all shards take similar time, too.
        """
        return parts[self.number - 1 :: self.count]


WHOLE = Shard(1, 1)
