"""Some of the damaged and hostile files of `fuzz.py`, of every kind; `python -m tests.engine.hostile.fuzz 5000` makes more."""

from __future__ import annotations

import pytest
from tests.engine.hostile import fuzz

CASES = 150


@pytest.mark.slow
@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_damaged_files_are_read_or_refused_in_one_line(kind: str) -> None:
    seen = fuzz.run_all(CASES, (kind,))[kind]
    assert seen.failures == []
    assert seen.cases == CASES
    assert seen.read > CASES / 30
    assert seen.refused > CASES / 10
    assert 0 < seen.slowest_s < fuzz.LONGEST_S
    assert 0 < seen.most_bytes < fuzz.MOST_BYTES


def test_a_case_comes_back_by_its_number() -> None:
    good = [b"version: 1\nrules: []\n", b"\x80\x02}."]
    for kind in fuzz.KINDS:
        if kind not in ("session", "scan"):
            assert [fuzz.mutated(kind, good[:1], n) for n in range(50)] == [
                fuzz.mutated(kind, good[:1], n) for n in range(50)
            ]
            assert len({fuzz.mutated(kind, good[:1], n) for n in range(50)}) > 10
