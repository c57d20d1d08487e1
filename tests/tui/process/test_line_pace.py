"""How fast a line is, from the times of answers on simulated lines."""

from __future__ import annotations

import pytest

from dtype_tui.process.line_pace import ASK_AFTER_BYTES, MOST_UNANSWERED, SLOW_BELOW, LinePace


class Line:
    """A line of `rate` bytes a second that takes `far` seconds each way; the terminal answers at once."""

    def __init__(self, rate: float, far: float = 0.0) -> None:
        self.rate, self.far, self.now = rate, far, 100.0
        self.free_at = 0.0
        self.pace = LinePace()

    def ask(self, sent: int) -> float:
        """Ask after `sent` bytes; when the answer comes."""
        self.pace.asked(self.now, sent)
        self.free_at = max(self.free_at, self.now) + sent / self.rate
        return self.free_at + 2 * self.far

    def start(self) -> None:
        """As the driver does: two questions, seventy bytes between them."""
        for answer in (self.ask(60), self.ask(70)):
            self.pace.answered(answer)
            self.now = answer

    def send(self, sent: int) -> None:
        """Write and wait for the answer."""
        self.now = self.ask(sent)
        self.pace.answered(self.now)


@pytest.mark.parametrize("far", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("rate", [120, 960])
def test_a_slow_line_is_known_before_the_first_frame(rate: int, far: float) -> None:
    line = Line(rate, far)
    assert line.pace.paced, "nothing is known yet"
    line.start()
    assert line.pace.slow
    for _ in range(10):
        line.send(line.pace.piece())
    assert line.pace.rate == pytest.approx(rate, rel=0.1)
    assert line.pace.piece() / rate <= max(0.26, 2 * far + 0.2, 60 / rate)


@pytest.mark.parametrize("far", [0.0, 0.3])
@pytest.mark.parametrize("rate", [3_840, 11_520])
def test_a_less_slow_one_by_its_first_frame(rate: int, far: float) -> None:
    line = Line(rate, far)
    line.start()
    assert not line.pace.paced
    assert line.pace.worth_asking(line.now + 10, 8_000)
    line.send(8_000)
    assert line.pace.slow


@pytest.mark.parametrize("far", [0.0, 0.3, 2.0])
def test_a_fast_line_is_not_slow_however_far(far: float) -> None:
    line = Line(1e6, far)
    line.start()
    for sent in (8_000, 100, 10_000, 10_000):
        assert not line.pace.paced
        line.send(sent)
    assert not line.pace.slow


def test_few_bytes_are_not_worth_a_question_nor_is_another_one_soon_after() -> None:
    line = Line(1e6)
    line.start()
    assert not line.pace.worth_asking(line.now + 10, 460)
    assert not line.pace.worth_asking(line.now + 1, ASK_AFTER_BYTES)
    assert line.pace.worth_asking(line.now + 10, ASK_AFTER_BYTES)


def test_a_line_that_becomes_faster_is_waited_for_no_more() -> None:
    line = Line(960)
    line.start()
    line.rate = 10 * SLOW_BELOW
    for _ in range(12):
        line.send(line.pace.piece())
    assert not line.pace.paced


def test_a_line_that_only_carries_a_few_bytes_at_a_time_does_not_become_faster() -> None:
    line = Line(960)
    line.start()
    for _ in range(100):
        line.send(15)
    assert line.pace.slow
    assert line.pace.rate == pytest.approx(960, rel=0.1)


def test_a_terminal_that_never_answers_is_waited_for_once_and_one_that_stops_three_times() -> None:
    pace = LinePace()
    pace.asked(1.0, 70)
    assert pace.paced
    pace.judge()
    assert not pace.paced
    assert not pace.worth_asking(100.0, 10_000)

    line = Line(960)
    line.start()
    for _ in range(MOST_UNANSWERED):
        assert line.pace.slow
        line.ask(100)
        assert line.pace.waiting
        line.pace.give_up()
        assert not line.pace.waiting
    assert not line.pace.paced
    assert not line.pace.worth_asking(line.now + 100, 10_000)


def test_an_answer_that_nobody_asked_for_is_a_key() -> None:
    pace = LinePace()
    pace.answered(1.0)
    assert not pace.answers
    assert pace.rate is None
