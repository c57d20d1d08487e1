"""The memory that a model and the process use, in bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """The memory of a model and of the process, in bytes. An unknown number is None."""

    stored_bytes: int | None = None
    """Bytes of the tensors in the checkpoint."""
    planned_bytes: int | None = None
    """Bytes of the same tensors in the dtypes of the recipe."""
    cache_stored_bytes: int | None = None
    """Bytes of the KV cache of one sequence of `cache_context` tokens without rules. None if the recipe gives it no format."""
    cache_planned_bytes: int | None = None
    """Bytes of the same KV cache in the recipe's formats."""
    cache_context: int | None = None
    cast_caches: int = 0
    """The number of KV cache tensors to which the recipe gives a format."""
    resident_bytes: int | None = None
    """Bytes of the live module's tensors, including non-persistent buffers."""
    resident_by_device: tuple[tuple[str, int], ...] = ()
    limits: tuple[tuple[str, int], ...] = ()
    """Pairs (device that `--max-memory` names, maximum bytes of weights on it)."""
    rss_bytes: int | None = None
    """The resident set size of the process: its memory that is in RAM."""
    anonymous_bytes: int | None = None
    """The part of the resident set that no file backs."""
    mapped_bytes: int | None = None
    """The part of the resident set that is mapped from the files of the checkpoint. The system can reclaim it."""
    peak_rss_bytes: int | None = None
    """The maximum of `rss_bytes` since the last operation, such as a measurement, began."""
    device_allocated_bytes: int | None = None
    device_reserved_bytes: int | None = None
    device_peak_bytes: int | None = None
    kept_bytes: int | None = None
    """Bytes of module outputs that are kept to speed up the next measurement, in the process or on the device."""
    kept_budget_bytes: int | None = None
    """The largest value that `kept_bytes` may have."""
    read_bytes: int | None = None
    """Bytes of weights read from the files since the last measurement began. None if the model does not run from the disk."""
