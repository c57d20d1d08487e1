"""Measured memory, in bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """The memory of a model and of the process, in bytes. An unknown number is None."""

    stored_bytes: int | None = None
    """Bytes of the tensors in the checkpoint."""
    planned_bytes: int | None = None
    """Bytes of the checkpoint's tensors in the dtypes of the recipe."""
    cache_stored_bytes: int | None = None
    """Bytes of the KV cache of one sequence of `cache_context` tokens without rules. None if no rule gives the cache a format."""
    cache_planned_bytes: int | None = None
    """Bytes of the same KV cache in the formats of the recipe, or None."""
    cache_context: int | None = None
    """The number of tokens of that sequence, or None."""
    resident_bytes: int | None = None
    """Bytes of the live module's tensors, including non-persistent buffers."""
    resident_by_device: tuple[tuple[str, int], ...] = ()
    rss_bytes: int | None = None
    """The resident set size of the process."""
    anonymous_bytes: int | None = None
    """The part of the process's resident set that no file backs, in bytes."""
    mapped_bytes: int | None = None
    """The part of the resident set that is mapped from the files of the checkpoint. The system can reclaim it."""
    peak_rss_bytes: int | None = None
    """The maximum resident set size since the last operation began."""
    device_allocated_bytes: int | None = None
    device_reserved_bytes: int | None = None
    device_peak_bytes: int | None = None
    kept_bytes: int | None = None
    """Bytes of outputs that are kept to speed up the next measurement. The memory of the process or the device includes them."""
    kept_budget_bytes: int | None = None
    """The limit for `kept_bytes`."""
