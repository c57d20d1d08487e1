"""The engine's life as the app sees it: told to stop, not stopping, gone, started again."""

from __future__ import annotations

import pytest
from tests.helpers.recording_engine import RecordingEngine

from dtype_engine.recipe import Recipe
from dtype_engine.service import events
from dtype_tui.state import engine_life
from dtype_tui.state.engine_life import EngineLife
from dtype_tui.state.scan import ScanState

MEASURING = events.MeasuringProgress(Recipe(), "candidate", 1, 4)


class Told(EngineLife):
    """With what it says and how often it wants to be drawn."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.withdrawn: list[str] = []
        self.drawn = 0
        self.recording = RecordingEngine(lambda event: None)
        self.scan = ScanState()
        say, withdraw = lambda words, severity: self.said.append(words), self.withdrawn.append
        super().__init__(self.recording, self.scan, say, self._draw, withdraw)

    def _draw(self) -> None:
        self.drawn += 1


@pytest.fixture
def life() -> Told:
    return Told()


@pytest.fixture
def measuring(life: Told) -> Told:
    life.follow(events.Jobs("measure", ()))
    life.follow(MEASURING)
    return life


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a job that was told to stop be overdue at once."""
    monkeypatch.setattr(engine_life, "STOP_WAIT_S", 0.0)


def test_shown_activity_of_the_engine_follows_the_events_of_the_engine(life: Told) -> None:
    assert life.current_activity() == ("opening", None, "")
    life.follow(MEASURING)
    assert life.current_activity() == ("measuring: candidate", 0.25, "")
    life.follow(events.Idle())
    assert life.current_activity() == ("", None, "")
    assert life.idle_words(False) == "ready"
    assert life.idle_words(True) == "no live model: planning only"


def test_cancelling_is_shown_until_the_job_has_stopped(measuring: Told) -> None:
    measuring.stop()
    assert measuring.recording.commands == ["cancel"]
    assert measuring.drawn == 1
    assert measuring.current_activity() == ("stopping: measuring: candidate", None, "")
    measuring.follow(MEASURING)
    assert measuring.current_activity()[0].startswith("stopping")
    measuring.follow(events.Idle())
    assert measuring.current_activity()[0] == ""
    measuring.follow(MEASURING)
    assert measuring.current_activity()[2] == ""


def test_cancelling_without_a_job_does_nothing(life: Told) -> None:
    life.follow(events.Idle())
    life.stop()
    assert life.recording.commands == []


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("end", [events.Idle(), events.Jobs("speed", ())])
def test_ending_an_engine_that_does_not_stop_is_offered_once(measuring: Told, end: events.Idle | events.Jobs) -> None:
    measuring.stop()
    assert not measuring.must_end
    measuring.check_stopped()
    measuring.check_stopped()
    assert measuring.must_end
    assert measuring.said == [
        "measuring: candidate has not stopped: Esc again ends the engine and starts another, with this recipe"
    ]
    assert measuring.current_activity() == ("not stopped: measuring: candidate", None, "Esc again ends the engine")
    assert measuring.withdrawn == []
    measuring.follow(end)
    assert not measuring.must_end
    assert measuring.withdrawn == measuring.said


@pytest.mark.usefixtures("_at_once")
def test_measurement_after_a_cancelled_measurement_is_not_shown_as_cancelled(measuring: Told) -> None:
    measuring.stop()
    measuring.note_stopped(events.Stopped(Recipe(), "measure"))
    measuring.check_stopped()
    assert not measuring.must_end
    assert measuring.current_activity()[2] == ""


@pytest.mark.usefixtures("_at_once")
def test_ending_the_engine_is_offered_if_opening_does_not_stop(life: Told) -> None:
    life.stop()
    life.note_stopped(events.Stopped(Recipe(), None))
    life.follow(events.Jobs("", ()))
    life.check_stopped()
    assert life.must_end


def test_every_cancelled_job_has_two_seconds_to_stop(measuring: Told) -> None:
    measuring.stop()
    measuring.check_stopped()  # by the timer of something that was stopped before
    assert not measuring.must_end


@pytest.mark.usefixtures("_at_once")
def test_engine_in_a_thread_cannot_be_ended_or_restarted(measuring: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingEngine, "can_restart", False)
    measuring.stop()
    measuring.check_stopped()
    assert not measuring.must_end
    assert not measuring.restart()
    assert "--in-process" in measuring.said[-1]
    assert "restart" not in measuring.recording.commands


def test_dead_engine_is_reported_with_lost_work_and_refuses_requests(measuring: Told) -> None:
    measuring.follow(events.SavingProgress(Recipe(), "writing", 1, 2))
    measuring.scan.begin(("int8",))
    measuring.follow_connection(events.EngineEnded("the engine ended: killed (SIGKILL)"))
    assert measuring.said == [
        "the engine ended: killed (SIGKILL); the files that it was writing are lost; s resumes the scan; R starts it again"
    ]
    assert measuring.current_activity() == ("", None, "")
    assert measuring.idle_words(False) == measuring.no_engine_words == "no engine: R starts it again"
    assert not measuring.scan.running
    measuring.expect("flow")
    measuring.begin("casting")
    assert measuring.said[-1] == "no engine: R starts it again"
    assert measuring.current_activity()[0] == ""
    assert measuring.may_quit()


def test_restarted_engine_opens_the_model(measuring: Told) -> None:
    measuring.follow_connection(events.EngineEnded("the engine ended"))
    assert measuring.restart()
    assert measuring.recording.commands == ["restart"]
    assert measuring.is_available()
    assert measuring.current_activity()[0] == "opening"
    assert measuring.said == ["the engine ended; R starts it again"]


def test_finished_scan_is_kept_after_the_engine_ends_and_an_unfinished_scan_is_lost(life: Told) -> None:
    life.scan.begin(("int8",))
    life.scan.finished = True
    life.follow_connection(events.EngineEnded("the engine ended"))
    assert not life.scan.lost
    life.restart()
    life.scan.begin(("int8",))
    life.follow_connection(events.EngineEnded("the engine ended"))
    life.restart()
    life.follow_connection(events.EngineEnded("the engine ended"))
    assert ["s resumes the scan" in words for words in life.said] == [False, True, False]
    assert life.scan.lost


def test_quitting_during_a_save_needs_a_second_request(life: Told) -> None:
    assert life.may_quit()
    life.follow(events.SavingProgress(Recipe(), "writing", 1, 2))
    assert [life.may_quit(), life.may_quit()] == [False, True]


def test_lost_connection_is_shown_until_it_returns(measuring: Told) -> None:
    measuring.follow_connection(events.EngineLost("the connection to host is cut"))
    assert measuring.current_activity() == ("", None, "")
    assert measuring.idle_words(False) == "connection cut: trying again"
    assert measuring.is_available()
    measuring.follow_connection(events.EngineBack())
    assert measuring.current_activity() == ("measuring: candidate", 0.25, "")


@pytest.mark.usefixtures("_at_once")
def test_ending_an_unreachable_engine_is_not_offered(measuring: Told) -> None:
    measuring.stop()
    measuring.follow_connection(events.EngineLost("the connection to host is cut"))
    measuring.check_stopped()
    assert not measuring.must_end


def test_warning_when_quitting_goes_when_its_reason_is_gone(life: Told) -> None:
    assert not life.may_quit(lost_rules=2)
    assert life.withdrawn == []
    life.forget_warning()
    life.forget_warning()
    assert life.withdrawn == life.said
