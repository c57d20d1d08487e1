"""Memory as it was measured, in bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Memory, in bytes, by the definitions of the help.

    stored: tensors in the checkpoint; planned: the same under the recipe; resident: the live module's tensors by
    device, non-persistent buffers included. rss is the process's resident set: its anonymous part, and the part that is
    mapped from the checkpoint's files, which the system can take back. peak_rss is since the last operation began. kept: module
    outputs that make the next measurement faster, a part of the process's memory or the device's, and the most they may be.
    """

    stored_bytes: int | None = None
    planned_bytes: int | None = None
    resident_bytes: int | None = None
    resident_by_device: tuple[tuple[str, int], ...] = ()
    rss_bytes: int | None = None
    anonymous_bytes: int | None = None
    mapped_bytes: int | None = None
    peak_rss_bytes: int | None = None
    device_allocated_bytes: int | None = None
    device_reserved_bytes: int | None = None
    device_peak_bytes: int | None = None
    kept_bytes: int | None = None
    kept_budget_bytes: int | None = None
