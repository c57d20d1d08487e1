"""The app's table of questions fits the engine's table of jobs."""

from __future__ import annotations

import typing
from importlib import import_module

import pytest

from dtype_engine.service.commands import OWN_NAMES
from dtype_engine.service.jobs import JOBS
from dtype_engine.service.messages import job_types
from dtype_tui.config.questions import COMMANDS, QUESTIONS, Question
from dtype_tui.screens.overlay import Answer


def test_every_job_of_the_engine_has_a_row_in_the_table_of_questions() -> None:
    assert [*JOBS] == sorted((row.job for row in QUESTIONS), key=[*JOBS].index)
    assert {row.job for row in (*QUESTIONS, *COMMANDS)} == {*JOBS, *OWN_NAMES}
    assert all(row.running and row.waiting and row.again for row in (*QUESTIONS, *COMMANDS))


def test_jobs_outside_the_palette_follow_a_measurement_or_belong_to_a_window() -> None:
    unasked = {row.job for row in QUESTIONS if not row.meaning}
    assert unasked == {job.name for job in JOBS.values() if job.follows} | {"activations", "tokens"}


@pytest.mark.parametrize("row", [row for row in QUESTIONS if row.window], ids=lambda row: row.job)
def test_window_of_a_question_accepts_the_result_type_of_its_job(row: Question) -> None:
    module, _, name = row.window.rpartition(".")
    hints = typing.get_type_hints(getattr(import_module(module), name))
    types = job_types(JOBS[row.job].run)
    assert hints["answer"] == Answer[types.parameters, types.result]  # type: ignore[name-defined]


@pytest.mark.parametrize("row", QUESTIONS, ids=lambda row: row.job)
def test_jobs_started_by_a_key_alone_have_no_parameters(row: Question) -> None:
    if row.meaning and not row.own_action:
        assert job_types(JOBS[row.job].run).parameters is type(None)
        assert row.window
