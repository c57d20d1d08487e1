"""Which GPU each process has: one for itself, where the model runs on GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(count: int, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The GPUs that this process sees, of which CUDA counts `count`, as `CUDA_VISIBLE_DEVICES` names them: by number or by UUID."""
    named = [name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip()]
    return tuple(named[:count]) if named else tuple(map(str, range(count)))


def assigned(index: int, gpus: tuple[str, ...], environment: MutableMapping[str, str] = os.environ) -> None:
    """Let this process, the `index`-th of its pool from 0, see one GPU alone. It must not have begun CUDA. Without GPUs all stays
    as it is.
    """
    if gpus:
        environment[VISIBLE] = gpus[index % len(gpus)]
