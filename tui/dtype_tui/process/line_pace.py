"""How fast the line to the terminal is, from when the terminal says where its cursor is."""

from __future__ import annotations

import threading
from collections import deque

SLOW_BELOW = 20_000.0
"""Bytes a second. A page of 10,000 bytes takes longer than half a second below it; the fastest serial lines have 11,520."""
FAST_ABOVE = 2 * SLOW_BELOW
NOTICED_S = 0.025
"""What a line takes for less than this is no sign of a slow one: a busy machine does as well."""
PIECE_S = 0.25
"""A key waits at most for so much that is under way."""
SMALLEST_PIECE = 60
ASK_AGAIN_S = 5.0
ASK_AFTER_BYTES = 2048
"""How fast the line is shows only with so many bytes. A cursor move has fewer: the question would be a hundredth of it."""
FIRST_PIECE = 2000
JUDGED_AFTER_S = 0.4
"""A terminal that has not answered by then gets its frames as if the line was fast. At 9,600 baud the answers take 0.15 s."""
PATIENCE_S = 3.0
MOST_UNANSWERED = 3


class LinePace:
    """What was asked and answered on a line, and what follows for what may be written next. All times are of one clock, in
    seconds. Questions may be noted by one thread and answers by another.

    The time that bytes take is the time from the question after them to its answer, less the way there and back, which is the
    shortest in which anything was answered; or from the answer before, where that came later.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal may interrupt who holds it
        self._asked: deque[tuple[float, int]] = deque()
        self._answered_at = 0.0
        self._asked_at = 0.0
        self._unanswered = 0
        self.round_trip: float | None = None
        """Seconds there and back; None before the first answer."""
        self.rate: float | None = None
        """Bytes a second; None while nothing tells."""
        self.slow = False
        self._judged = False
        self._answers = 0
        self._first_sent = 0

    def asked(self, now: float, sent: int) -> None:
        """The terminal is asked at `now`, after `sent` bytes since it was asked last."""
        with self._lock:
            self._asked.append((now, sent))
            self._asked_at = now

    def answered(self, now: float) -> None:
        """The terminal has answered the oldest question."""
        with self._lock:
            if not self._asked:
                return  # a key that terminals send in the same words: F3 with a modifier
            asked_at, sent = self._asked.popleft()
            taken = now - asked_at
            self.round_trip = taken if self.round_trip is None else min(self.round_trip, taken)
            carried = now - max(self._answered_at, asked_at + self.round_trip)
            self._answered_at = now
            self._answers += 1
            self._judged = self._judged or self._answers == 2
            self._take(sent, carried)
            if self._answers == 1:
                self._first_sent = sent
            elif self._answers == 2 and self.rate is not None:
                # The first answer came after bytes that took their time as well.
                self.round_trip = max(0.0, self.round_trip - self._first_sent / self.rate)

    def _take(self, sent: int, carried: float) -> None:
        if carried >= NOTICED_S:
            rate = sent / carried
            self.rate = rate if self.rate is None else min((self.rate + rate) / 2, 2 * self.rate)
            if rate < SLOW_BELOW and self._unanswered < MOST_UNANSWERED:
                self.slow = True
        elif self.rate is not None and sent / self.rate >= 2 * NOTICED_S:
            # At the rate so far it would have taken longer. By how much the line is faster, only more bytes will tell.
            self.rate *= 2
        if self.rate is not None and self.rate > FAST_ABOVE:
            self.slow, self.rate = False, None

    @property
    def paced(self) -> bool:
        """Whether what is drawn has to wait for its turn: the line is slow, or nothing is known of it yet."""
        return self.slow or not self._judged

    @property
    def judged(self) -> bool:
        """Whether two answers have told how fast the line is, or none came in time."""
        return self._judged

    def judge(self) -> None:
        """Take the line for what it seems to be now."""
        self._judged = True

    @property
    def waiting(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._asked)

    @property
    def answers(self) -> bool:
        """Whether the terminal has answered at all."""
        return self._answers > 0

    def worth_asking(self, now: float, sent: int) -> bool:
        """Whether to ask after `sent` bytes on a line that is not known to be slow."""
        return (
            self.answers
            and not self.waiting
            and not self.slow
            and sent >= ASK_AFTER_BYTES
            and now - self._asked_at >= ASK_AGAIN_S
            and self._unanswered < MOST_UNANSWERED
        )

    def piece(self) -> int:
        """Bytes that may be written at a time: what the line takes a quarter of a second for, or as long as an answer is on its
        way, where that is longer, since nothing else is written meanwhile.
        """
        if self.rate is None:
            return FIRST_PIECE
        return max(SMALLEST_PIECE, int(self.rate * max(PIECE_S, self.round_trip or 0.0)))

    def patience(self) -> float:
        """Seconds after which an answer will not come any more."""
        with self._lock:
            outstanding = sum(sent for _, sent in self._asked)
        carried = outstanding / self.rate if self.rate else 0.0
        return PATIENCE_S + 4 * ((self.round_trip or 0.0) + carried)

    def give_up(self) -> None:
        """Wait for no answer any more. A terminal that gave none three times is waited for no more."""
        with self._lock:
            self._asked.clear()
            self._unanswered += 1
            if self._unanswered >= MOST_UNANSWERED:
                self.slow = False
