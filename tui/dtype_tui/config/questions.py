"""The table of questions: for each job of the engine, the words for it, its key, and the window for its result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
from textual.binding import Binding


class Question(msgspec.Struct, frozen=True):
    """A job of the engine, as the app shows it. Most jobs answer a question that the user asks with a key or a `:` command."""

    job: str
    """The name of the job, or of a command of the engine. A question without a key is asked by the `:` command of this name."""
    running: str
    waiting: str
    again: str
    """What the user is told after the job was stopped, such as "f traces them again"."""
    key: str = ""
    meaning: str = ""
    """What the key or the `:` command does, for the palette. "" for a job that is not in the palette."""
    group: Literal["Look", "Measure", ""] = ""
    """The title of the group of keys in the help to which the key belongs."""
    help: str = ""
    """What the key does, short enough for one of the help's columns."""
    also: str = ""
    """Words that find the key or the `:` command, besides those of `meaning`."""
    own_action: str = ""
    """The name of the main screen's action that the key runs. If "", the key asks for the job, which then has no parameters."""
    window: str = ""
    """The function that makes a window for the result, such as `dtype_tui.screens.speed.speed_screen`. It takes an `Answer`, and is
    imported when the result arrives. "" if the result opens no window.
    """

    @property
    def action(self) -> str:
        return self.own_action or f"ask('{self.job}')"


QUESTIONS = [
    Question(
        "causes", "running each module as cast by itself", "causes", "d runs them again", key="d", group="Measure",
        meaning="Drift over depth, and the modules that cause the drift", help="causes of the drift",
        also="blame depth arises origin", own_action="causes",
    ),
    Question(
        "flow", "tracing casts", "dtype flow", "f traces them again", key="f", group="Measure",
        meaning="Dtype flow: list the implicit casts", help="dtype flow: implicit casts", also="implicit promotion trace",
        window="dtype_tui.screens.flow.flow_screen",
    ),
    Question(
        "generate", "generating", "text", "g generates again", key="g", group="Measure",
        meaning="Text of the reference, with the tokens at which the candidate differs; or pictures of both",
        help="generate text or pictures", also="sample picture completion tokens tie greedy", own_action="generate",
    ),
    Question("tokens", "comparing tokens", "tokens", "g compares them again"),
    Question(
        "speed", "timing", "timing", "t times again", key="t", group="Measure",
        meaning="Time forward passes", help="time forward passes",
        also="latency benchmark throughput seconds", window="dtype_tui.screens.speed.speed_screen",
    ),
    Question(
        "executions", "comparing executions", "executions", "b compares them again", key="b", group="Measure",
        meaning="Executions: the same weights with another attention kernel, batch or decoding", help="compare executions",
        also="batch invariance kernel attention decode padding determinism",
        window="dtype_tui.screens.executions.executions_screen",
    ),
    Question(
        "values", "reading the values", "values", "v reads them again", key="v", group="Look",
        meaning="Values of the tensor: exponents, and the error of each cast", help="values of a tensor",
        also="histogram distribution weights overflow underflow", own_action="values",
        window="dtype_tui.screens.weight_values.weight_screen",
    ),
    Question(
        "check", "checking the files", "check", ":check checks again",
        meaning="Check the model's files: parts, scales, dtypes, what is missing", also="broken missing lint verify",
        window="dtype_tui.screens.check.check_screen",
    ),
    Question("activations", "following passes", "activations", ":activations estimates again"),
    Question("nonfinite", "looking for what makes the output finite", "what is not finite", "the drift stays valid"),
    Question("losses", "looking for values that are lost", "lost values", "m looks again"),
    Question("weights", "comparing the weights", "weights", "m compares them again"),
    Question("floor", "measuring the noise floor", "noise floor", "the drift stays valid"),
    Question("kernels", "measuring other kernels", "other kernels", "the drift stays valid"),
]  # fmt: skip
"""The rows, in the order of their keys in the help and in the palette."""


def bindings_in(group: str) -> list[Binding]:
    """Return the key bindings of the questions in a group of the help, such as "Measure"."""
    return [
        Binding(row.key, row.action, row.meaning, tooltip=row.also)
        for row in QUESTIONS
        if row.key and row.group == group
    ]


def questions_without_keys() -> Iterator[Question]:
    """Yield the questions that only a `:` command and the palette ask."""
    return (row for row in QUESTIONS if row.meaning and not row.key)


COMMANDS = [
    Question("measure", "measuring", "measuring", "m measures again"),
    Question("inputs", "preparing the inputs", "inputs", "the previous inputs stay in use"),
    Question("recipe", "applying the rules", "rules", "they are applied"),
    Question("download", "downloading", "download", ":download goes on with it"),
    Question("over-memory", "opening", "opening", "O opens it again"),
    Question("scan", "scan", "scan", "s resumes it"),
    Question("recipes", "measuring recipes", "recipes", "the measured ones are in the history"),
    Question("write", "writing", "writing", "e writes"),
]
"""The words for commands of the engine that are not jobs."""


def row_of(job: str) -> Question:
    """Return the row of `QUESTIONS` or `COMMANDS` with the words for a job or a command of the engine."""
    return next(row for row in (*QUESTIONS, *COMMANDS) if row.job == job)
