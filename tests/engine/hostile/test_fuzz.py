"""Some of the damaged and hostile files of `fuzz.py`, of every kind; `python -m tests.engine.hostile.fuzz 5000` makes more."""

from __future__ import annotations

import pytest
from tests.engine.hostile import fuzz, fuzz_events, fuzz_hub, fuzz_inputs, fuzz_models, fuzz_quantized, fuzz_saved

CASES = 100
FEW = 12
"""The number of cases of kinds that open a model or the app in each case, which takes a fifth of a second."""
OPENING = (*fuzz_inputs.KINDS, *fuzz_events.KINDS, *fuzz_quantized.KINDS, *fuzz_models.KINDS, *fuzz_hub.KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_fuzzed_files_are_read_or_refused_in_one_line(kind: str) -> None:
    cases = FEW if kind in OPENING else CASES
    seen = fuzz.run_all(cases, (kind,))[kind]
    assert seen.failures == []
    assert seen.cases == cases
    assert seen.read > cases / 30
    assert seen.refused > cases / 10 or kind in fuzz_events.KINDS  # the app reads on, whatever it is sent
    assert 0 < seen.slowest_s < fuzz.LONGEST_S
    assert 0 < seen.most_bytes < fuzz.MOST_BYTES


def test_fuzz_case_is_reproducible_by_number() -> None:
    good = [b"version: 1\nrules: []\n", b"\x80\x02}."]
    for kind in fuzz.KINDS:
        in_json = (*fuzz_models.KINDS, *fuzz_saved.KINDS)
        if kind not in ("session", "scan", "tokenizer", "processor", "event", "quantized", "hub", *in_json):
            assert [fuzz.mutated(kind, good[:1], n) for n in range(50)] == [
                fuzz.mutated(kind, good[:1], n) for n in range(50)
            ]
            assert len({fuzz.mutated(kind, good[:1], n) for n in range(50)}) > 10
