"""Merges the result files of several jobs that have shared one scan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtype_engine.core.errors import UserError
from dtype_engine.core.shard import WHOLE, Shard
from dtype_engine.runtime.scan import saved as scan_file
from dtype_engine.runtime.scan.saved import SavedScan

_NAMED = 12


def merge(files: Sequence[Path]) -> SavedScan:
    """Return one scan with all results in `files`, as if one process had run the whole scan. Raises UserError if a file is from
    another scan, if two files have different results for the same part, or if results are missing.
    """
    first, *others = [scan_file.read_any(file) for file in files]
    for file, other in zip(files[1:], others, strict=True):
        differing = scan_file.different(other.fingerprint, first.fingerprint)
        differing += ["number of draws"] if other.draws != first.draws else []
        differing += ["number of parts"] if other.parts != first.parts else []
        differing += ["method"] if (other.measured is None) != (first.measured is None) else []
        if differing:
            raise UserError(f"{file} is of another scan than {files[0]}: another {' and '.join(differing)}")
    whole = first
    for file, other in zip(files[1:], others, strict=True):
        whole = _joined(whole, other, file)
    if whole.count < whole.parts:
        raise UserError(_missing(whole, dict(zip(files, (first, *others), strict=True))))
    return dataclasses.replace(whole, shard=WHOLE)


def _joined(one: SavedScan, other: SavedScan, file: Path) -> SavedScan:
    both = (one.done.keys() & other.done.keys(), (one.measured or {}).keys() & (other.measured or {}).keys())
    if any(one.done[index] != other.done[index] for index in both[0]) or any(
        (one.measured or {})[key] != (other.measured or {})[key] for key in both[1]
    ):
        raise UserError(f"{file} has parts that an earlier file has with different values; leave one of the two out")
    # An estimated scan states the time of forward passes over all its sequences, an exact one that of one pass.
    added = one.forward_seconds + other.forward_seconds
    return dataclasses.replace(
        one,
        unit=one.unit or other.unit,
        forward_seconds=added if one.measured is None else one.forward_seconds or other.forward_seconds,
        scan_seconds=one.scan_seconds + other.scan_seconds,
        done=one.done | other.done,
        measured=None if one.measured is None else one.measured | (other.measured or {}),
        roundings={**one.roundings, **other.roundings},
    )


def _missing(whole: SavedScan, files: Mapping[Path, SavedScan]) -> str:
    """Return a sentence that names the shards without a file, and the files of unfinished jobs. whole: the merged scan."""
    parts = [f"{whole.parts - whole.count} of {whole.parts} parts are missing"]
    counts = {scan.shard.count for scan in files.values()}
    if len(counts) == 1:
        count = counts.pop()
        there = {scan.shard.number for scan in files.values()}
        absent = [str(Shard(number, count)) for number in range(1, count + 1) if number not in there]
        parts += [f"there is no file of shard {_named(absent)}"] if absent else []
    unfinished = [str(file) for file, scan in files.items() if scan.count < len(scan.shard.of(range(scan.parts)))]
    parts += [f"{_named(unfinished)} did not finish: run it again with the same --save"] if unfinished else []
    return "; ".join(parts)


def _named(names: Sequence[str]) -> str:
    return ", ".join([*names[:_NAMED], *(["..."] if len(names) > _NAMED else [])])
