"""Measurements report their steps, from which a progress bar fills. Drift: `test_drift.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import dtype_engine as de

Report = Callable[[int, int | None], None]
"""Called with the number of finished steps and of all steps, or None for an unknown number."""


def _generate(session: de.Session, report: Report) -> None:
    session.generate(4, lambda run, done, total: report(done, total))


def _speed(session: de.Session, report: Report) -> None:
    session.speed(lambda variant, done, total: report(done, total), repeats=3)


def _scan(session: de.Session, report: Report) -> None:
    session.scan(("float16",), on_progress=lambda step, done, total: report(done, total))


MEASUREMENTS: dict[str, Callable[[de.Session, Report], object]] = {
    "noise floor": lambda session, report: session.floor(report),
    "causes": lambda session, report: session.causes(report),
    "generated text": _generate,
    "speed": _speed,
    "scan": _scan,
}


@pytest.fixture(scope="module")
def session() -> de.Session:
    made = de.open(options=de.Options(device="cpu", prompts=("import os\n", "def main():\n")))
    made.cast("model.layers.0.mlp", "float16")
    return made


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_measurement_reports_rising_numbers_of_finished_steps(session: de.Session, name: str) -> None:
    shares: list[float] = []

    def report(done: int, total: int | None) -> None:
        if total:
            shares.append(done / total)

    MEASUREMENTS[name](session, report)
    assert len(set(shares)) > 1
    assert max(shares) <= 1
    assert shares[-1] > shares[0]
