"""What the engine's jobs are called on the screen, and how to ask for one again."""

from __future__ import annotations

from collections.abc import Iterable

WORDS: dict[str, tuple[str, str]] = {
    "measure": ("measuring", "m measures again"),
    "inputs": ("preparing the inputs", "the inputs before stay in force"),
    "recipe": ("taking over the rules", "they are in force"),
    "flow": ("tracing casts", "f traces them again"),
    "causes": ("running each module as cast by itself", "d runs them again"),
    "generate": ("generating", "g generates again"),
    "speed": ("timing", "t times again"),
    "scan": ("scan", "s goes on with it"),
    "values": ("reading the values", "v reads them again"),
    "write": ("writing", "e writes"),
    "nonfinite": ("looking for what makes the output finite", "the drift stands"),
    "losses": ("looking for values that are lost", "m looks again"),
    "floor": ("the reference against itself", "the drift stands"),
}
"""By job: what is done, and what a user who stopped it should know."""


def queue_words(running: str, waiting: Iterable[str]) -> str:
    """`scan, writing`: the jobs that wait, in order. A measurement that runs and will start again is not named twice."""
    return ", ".join(WORDS[name][0] for name in waiting if not (name == running == "measure"))


def stopped_sentence(stopped: str | None, dropped: Iterable[str]) -> str:
    """`stopped: timing; t times again. Not begun: scan`."""
    rest = ", ".join(WORDS[name][0] for name in dropped)
    if stopped is None:
        return f"stopped before it began: {rest}"
    what, again = WORDS[stopped]
    return f"stopped: {what}; {again}" + (f". Not begun: {rest}" if rest else "")
