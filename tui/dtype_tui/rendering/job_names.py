"""What the engine's jobs are called on the screen, and how to ask for one again."""

from __future__ import annotations

from collections.abc import Iterable

WORDS: dict[str, tuple[str, str, str]] = {
    "measure": ("measuring", "measuring", "m measures again"),
    "inputs": ("preparing the inputs", "inputs", "the inputs before stay in force"),
    "recipe": ("taking over the rules", "rules", "they are in force"),
    "flow": ("tracing casts", "dtype flow", "f traces them again"),
    "causes": ("running each module as cast by itself", "causes", "d runs them again"),
    "generate": ("generating", "text", "g generates again"),
    "speed": ("timing", "timing", "t times again"),
    "check": ("checking the files", "check", ":check checks again"),
    "scan": ("scan", "scan", "s goes on with it"),
    "recipes": ("measuring recipes", "recipes", "those that were measured are in the history"),
    "values": ("reading the values", "values", "v reads them again"),
    "write": ("writing", "writing", "e writes"),
    "nonfinite": ("looking for what makes the output finite", "what is not finite", "the drift stands"),
    "losses": ("looking for values that are lost", "lost values", "m looks again"),
    "floor": ("the reference against itself", "floor", "the drift stands"),
}
"""By job: what is done, what it is called while it waits, and what a user who stopped it should know."""


def queue_words(running: str, waiting: Iterable[str]) -> str:
    """`scan, writing`: the jobs that wait, in order. A measurement that runs and will start again is not named twice."""
    return ", ".join(WORDS[name][1] for name in waiting if not (name == running == "measure"))


def stopped_sentence(stopped: str | None, dropped: Iterable[str]) -> str:
    """`stopped: timing; t times again. Not begun: scan`."""
    rest = ", ".join(WORDS[name][1] for name in dropped)
    if stopped is None:
        return f"stopped before it began: {rest}"
    what, _, again = WORDS[stopped]
    return f"stopped: {what}; {again}" + (f". Not begun: {rest}" if rest else "")
