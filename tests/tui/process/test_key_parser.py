from __future__ import annotations

import random

import pytest
from textual.events import CursorPosition, Key

from dtype_tui.process.key_parser import KeyParser

ALONE = ("a", "q", "Z", "1", "/", "?", " ", "\r", "\t", "\x7f", "\x01", "é", "\x1b[A", "\x1b[3~", "\x1bOP", "\x1b[3;4R")


def parsed(written: str) -> list[str]:
    """The keys and positions of one write."""
    found: list[str] = []
    for event in KeyParser().feed(written):
        if isinstance(event, Key):
            # Alt and a letter that nothing is bound to are Escape and the letter, which is the app's to know.
            found += ["escape", event.character or ""] if event.key.startswith("alt+") else [event.key]
        elif isinstance(event, CursorPosition):
            found.append(f"cursor {event.x},{event.y}")
    return found


@pytest.mark.parametrize("after", ["\x1b[A", "\x1b[3;4R", "\x1b[<0;5;5M"])
def test_what_follows_escape_and_a_letter_makes_no_text_of_them(after: str) -> None:
    keys = [event.key for event in KeyParser().feed(f"\x1bq{after}") if isinstance(event, Key)]
    assert keys[0] == "alt+q"
    assert "circumflex_accent" not in keys


@pytest.mark.parametrize(
    ("character", "key"), [("1", "1"), ("0", "0"), ("/", "slash"), ("?", "question_mark"), ("=", "equals_sign")]
)
def test_escape_and_a_digit_or_a_mark_are_both(character: str, key: str) -> None:
    assert parsed(f"\x1b{character}") == ["escape", key]


def test_what_terminals_send_for_keys_is_what_it_was() -> None:
    assert parsed("\x1b[A\x1bOP\x1bb\x1bf") == ["up", "f1", "ctrl+left", "ctrl+right"]


@pytest.mark.parametrize("seed", range(40))
def test_keys_in_one_write_are_the_keys_one_by_one(seed: int) -> None:
    chance = random.Random(seed)
    keys = [chance.choice(ALONE) for _ in range(30)]
    written, expected = "", []
    for key in keys:
        if len(key) == 1 and key.isprintable() and chance.random() < 0.3:
            written += "\x1b"
            expected.append("escape")
        written += key
        expected += parsed(key)
    assert parsed(written) == expected
