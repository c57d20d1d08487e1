"""Names of the engine's jobs on the screen, and how to restart a stopped job."""

from __future__ import annotations

from collections.abc import Iterable

from dtype_tui.config.questions import QUESTIONS

WORDS: dict[str, tuple[str, str, str]] = {
    "measure": ("measuring", "measuring", "m measures again"),
    "inputs": ("preparing the inputs", "inputs", "the previous inputs stay in use"),
    "recipe": ("applying the rules", "rules", "they are applied"),
    "download": ("downloading", "download", ":download goes on with it"),
    "over-memory": ("opening", "opening", "O opens it again"),
    "scan": ("scan", "scan", "s resumes it"),
    "recipes": ("measuring recipes", "recipes", "the measured ones are in the history"),
    "write": ("writing", "writing", "e writes"),
    **{row.job: (row.running, row.waiting, row.again) for row in QUESTIONS},
}
"""Maps the name of each command and each job of the engine, such as "scan", to three texts: its name while it runs, its name while
it waits, and what to tell the user after it was stopped.
"""


def queue_words(running: str, waiting: Iterable[str]) -> str:
    """Return the names of the waiting jobs in order, such as `scan, writing`. Omits a waiting measurement while another measurement
    is running.
    """
    return ", ".join(WORDS[name][1] for name in waiting if not (name == running == "measure"))


def stopped_sentence(stopped: str | None, dropped: Iterable[str]) -> str:
    """Return the notice after a stop, such as `stopped: timing; t times again. Not begun: scan`.

    stopped: the job that was running, or None if none had begun. dropped: the jobs that were waiting.
    """
    rest = ", ".join(WORDS[name][1] for name in dropped)
    if stopped is None:
        return f"stopped before it began: {rest}"
    what, _, again = WORDS[stopped]
    return f"stopped: {what}; {again}" + (f". Not begun: {rest}" if rest else "")
