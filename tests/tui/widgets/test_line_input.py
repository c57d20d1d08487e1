"""The keys of a line to type in, as they come one by one and as they come together, against a line editor in plain Python."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.helpers.recording_engine import make_app, running
from tests.helpers.screen_text import notices
from textual.app import ComposeResult
from textual.events import Event, Key, Paste
from textual.widgets import Static

from dtype_tui.base_app import BaseApp
from dtype_tui.config.config import Config
from dtype_tui.widgets.line_input import LineInput

CHARACTERS = "abcXY01 .*=:/-_,é→語"


@dataclass
class Editor:
    """A line editor: text, where the selection begins, and the cursor, which is its end."""

    text: str = ""
    start: int = 0
    cursor: int = 0
    entered: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    """Every text that it had, one after the other."""

    def press(self, key: str) -> None:
        before = self.text
        select = "shift+" in key
        moves = select or self.start == self.cursor
        match key.replace("shift+", ""):
            case "left":
                self._move(self.cursor - 1 if moves else min(self.start, self.cursor), select)
            case "right":
                self._move(self.cursor + 1 if moves else max(self.start, self.cursor), select)
            case "ctrl+left" | "alt+b":
                self._move(self._word_before(), select)
            case "ctrl+right" | "alt+f":
                self._move(self._word_after(), select)
            case "ctrl+a" if select:
                self.start, self.cursor = 0, len(self.text)
            case "home" | "ctrl+a":
                self.start = self.cursor  # a selection that there is ends where the cursor is
                self._move(0, select)
            case "end" | "ctrl+e":
                self.start = self.cursor
                self._move(len(self.text), select)
            case "backspace":
                self._cut(self.cursor - 1, self.cursor)
            case "delete" | "ctrl+d":
                self._cut(self.cursor, self.cursor + 1)
            case "ctrl+w" | "ctrl+backspace":
                self._cut(self._word_before(), self.cursor)
            case "alt+d":
                self._cut(self.cursor, self._word_after())
            case "ctrl+u":
                self._cut(0, self.cursor)
            case "ctrl+k":
                self._cut(self.cursor, len(self.text))
            case "enter":
                self.entered.append(self.text)
            case _:
                raise AssertionError(key)
        if self.text != before:
            self.told.append(self.text)

    def type(self, text: str) -> None:
        first, last = sorted((self.start, self.cursor))
        before, self.text = self.text, self.text[:first] + text + self.text[last:]
        self.start = self.cursor = first + len(text)
        if self.text != before:
            self.told.append(self.text)

    def _move(self, to: int, select: bool) -> None:
        self.cursor = max(0, min(to, len(self.text)))
        if not select:
            self.start = self.cursor

    def _cut(self, first: int, last: int) -> None:
        if self.start != self.cursor:
            first, last = sorted((self.start, self.cursor))
        first = max(first, 0)
        self.text = self.text[:first] + self.text[last:]
        self.start = self.cursor = first

    def _begins_word(self, at: int) -> bool:
        word, before = self.text[at], self.text[at - 1]
        return (word.isalnum() or word == "_") and not (before.isalnum() or before == "_")

    def _word_before(self) -> int:
        return next((at for at in range(self.cursor - 1, 0, -1) if self._begins_word(at)), 0)

    def _word_after(self) -> int:
        return next((at for at in range(self.cursor + 1, len(self.text)) if self._begins_word(at)), len(self.text))


class Host(BaseApp[None]):
    """An app in which only a line can have the focus."""

    def __init__(self) -> None:
        super().__init__(Config())
        self.entered: list[str] = []
        self.told: list[str] = []

    def compose(self) -> ComposeResult:
        yield Static("a line:")
        yield LineInput("line", self.entered.append, self.told.append)

    @property
    def state(self) -> tuple[str, int, int, list[str], list[str]]:
        line = self.query_one(LineInput)
        return line.value, line.selection.start, line.selection.end, self.entered[:], self.told[:]

    async def type(self, strokes: Sequence[str], together: bool) -> None:
        """Post the keys: all before the first is handled, or each after the one before it was handled."""
        for stroke in strokes:
            self.post_message(event_of(stroke))
            if not together:
                await self.looked_at()
                await asyncio.sleep(0)
        await self.looked_at()

    async def looked_at(self) -> None:
        """Wait until the keys that were posted so far are handled."""
        done = asyncio.Event()
        self.call_later(done.set)
        await done.wait()

    def empty(self) -> None:
        self.query_one(LineInput).value = ""
        self.entered.clear()
        self.told.clear()


def event_of(stroke: str) -> Event:
    """Return the event of a stroke: a character is typed, a name is a key, and text after ^ is pasted."""
    if stroke.startswith("^"):
        return Paste(stroke[1:])
    return Key(stroke, stroke) if len(stroke) == 1 else Key(stroke, None)


def edited(strokes: Sequence[str]) -> Editor:
    editor = Editor()
    for stroke in strokes:
        if stroke.startswith("^"):
            editor.type(stroke[1:])
        elif len(stroke) == 1:
            editor.type(stroke)
        else:
            editor.press(stroke)
    return editor


@pytest.fixture(scope="module")
def host() -> Iterator[tuple[Host, asyncio.Runner]]:
    """Yield one app for all sequences: to start an app takes longer than a hundred of them."""
    with asyncio.Runner() as runner:
        app = Host()
        opened = app.run_test(size=(80, 24))
        runner.run(opened.__aenter__())
        yield app, runner
        runner.run(opened.__aexit__(None, None, None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pasted", "taken", "said"),
    [
        ("*.mlp=bf16", "*.mlp=bf16", []),
        ("*.mlp=bf16\r\n", "*.mlp=bf16", []),
        ("\n*.mlp=bf16\n", "*.mlp=bf16", []),
        ("*=bf16\n*norm*=f32\n", "*=bf16", ["pasted the first line; the other is left out: paste one at a time"]),
        ("a\n\nb\nc", "a", ["pasted the first line; the 2 others are left out: paste one at a time"]),
        ("\x1b[31m3\u202e", "\\x1b[31m3\\u202e", []),
        ("a\n" * 20_000, "a", ["pasted the first line; the 19,999 others are left out: paste one at a time"]),
        (
            "a" * 1_000_000,
            "a" * 100_000,
            ["pasted the first 100,000 characters of 1,000,000: the rest is left out"],
        ),
        ("", "", []),
        ("\n", "", []),
    ],
)
async def test_line_input_reports_refused_parts_of_a_paste(pasted: str, taken: str, said: list[str]) -> None:
    app = make_app()
    async with running(app, (80, 24)) as pilot:
        await pilot.press("c", "ctrl+u")
        app.post_message(Paste(pasted))
        await pilot.pause()
        await pilot.pause()
        assert isinstance(app.focused, LineInput)
        assert app.focused.value == taken
        assert notices(app) == said


@pytest.mark.slow
async def test_typing_replaces_a_suggested_pattern_and_cursor_keys_keep_it() -> None:
    app = make_app()
    async with running(app, (80, 24)) as pilot:
        for key in ("c", "e"):
            await pilot.press(key)
            field = app.focused
            assert isinstance(field, LineInput)
            suggested = field.value
            await pilot.press("end", "x")
            assert field.value == f"{suggested}x"
            await pilot.press("escape", key, *"*.mlp")
            assert isinstance(app.focused, LineInput)
            assert app.focused.value == "*.mlp"
            await pilot.press("escape")
        await pilot.press("c", "tab", "shift+tab", "x")
        assert isinstance(app.focused, LineInput)
        assert app.focused.value == "*=bf16x", "a pattern that was chosen by Tab is the user's"


MOVES = [
    *("left", "right", "home", "end", "shift+left", "shift+right", "shift+home", "shift+end", "alt+b", "alt+f"),
    *("ctrl+left", "ctrl+right", "ctrl+shift+left", "ctrl+shift+right", "ctrl+a", "ctrl+e", "ctrl+shift+a"),
]
CUTS = ["backspace", "delete", "ctrl+d", "ctrl+w", "ctrl+u", "ctrl+k", "ctrl+backspace", "alt+d"]
STROKES = st.one_of(
    st.sampled_from(CHARACTERS),
    st.sampled_from(CHARACTERS),
    st.sampled_from(MOVES),
    st.sampled_from(CUTS),
    st.just("enter"),
    st.text(CHARACTERS, min_size=1, max_size=5).map(lambda text: f"^{text}"),
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(strokes=st.lists(STROKES, max_size=25))
@example(strokes=["a", "b", "c", "backspace", "d"])
@example(strokes=["a", "b", "c", "left", "left", "X"])
@example(strokes=["a", "ctrl+u", "b", "enter", "c"])
@example(strokes=["a", " ", "b", "shift+left", "shift+left", "c"])
def test_keys_received_together_edit_a_line_like_single_keys(
    host: tuple[Host, asyncio.Runner], strokes: list[str]
) -> None:
    app, runner = host

    async def typed(together: bool) -> tuple[str, int, int, list[str], list[str]]:
        app.empty()
        await app.type(strokes, together)
        return app.state

    editor = edited(strokes)
    wanted = (editor.text, editor.start, editor.cursor, editor.entered, editor.told)
    assert runner.run(typed(together=True)) == wanted
    assert runner.run(typed(together=False)) == wanted
