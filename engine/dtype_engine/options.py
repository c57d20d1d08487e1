"""What a user may ask for when opening a model. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Options:
    """How to open and run a model.

    device: "cpu", "cuda" or "auto" (cuda where there is one that works).
    prompts, texts: calibration text for language models; each prompt and each text file is one sequence.
    reference_bytes: budget for the reference's stored outputs; None for a quarter of the memory that is free.
    compute: the dtype that storage-only weights come back to where no activation says which.
    """

    device: str = "auto"
    prompts: tuple[str, ...] = ()
    texts: tuple[Path, ...] = ()
    trust_pickle: bool = False
    trust_remote_code: bool = False
    reference_bytes: int | None = None
    compute: str = "float32"
    threads: int | None = None
