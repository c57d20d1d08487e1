from __future__ import annotations

import random

import pytest
from textual import constants
from textual.events import CursorPosition, Key, Paste

from dtype_tui.process import key_parser
from dtype_tui.process.key_parser import KeyParser

ALONE = ("a", "q", "Z", "1", "/", "?", " ", "\r", "\t", "\x7f", "\x01", "é", "\x1b[A", "\x1b[3~", "\x1bOP", "\x1b[3;4R")


def parsed(*written: str) -> list[str]:
    """Return the keys, cursor positions and pastes that the parser finds in some writes."""
    found: list[str] = []
    parser = KeyParser()
    for event in (event for write in written for event in parser.feed(write)):
        if isinstance(event, Key):
            # Alt and a letter that nothing is bound to are Escape and the letter, which is the app's to know.
            found += ["escape", event.character or ""] if event.key.startswith("alt+") else [event.key]
        elif isinstance(event, CursorPosition):
            found.append(f"cursor {event.x},{event.y}")
        elif isinstance(event, Paste):
            found.append(f"pasted {event.text}")
    return found


@pytest.mark.parametrize("after", ["\x1b[A", "\x1b[3;4R", "\x1b[<0;5;5M"])
def test_escape_followed_by_a_letter_is_parsed_as_alt_without_text(after: str) -> None:
    keys = [event.key for event in KeyParser().feed(f"\x1bq{after}") if isinstance(event, Key)]
    assert keys[0] == "alt+q"
    assert "circumflex_accent" not in keys


@pytest.mark.parametrize(
    ("character", "key"), [("1", "1"), ("0", "0"), ("/", "slash"), ("?", "question_mark"), ("=", "equals_sign")]
)
def test_escape_followed_by_a_digit_or_mark_is_parsed_as_two_keys(character: str, key: str) -> None:
    assert parsed(f"\x1b{character}") == ["escape", key]


def test_terminal_key_sequences_are_parsed() -> None:
    assert parsed("\x1b[A\x1bOP\x1bb\x1bf") == ["up", "f1", "ctrl+left", "ctrl+right"]


@pytest.mark.parametrize("seed", range(40))
def test_keys_in_one_write_are_parsed_one_by_one(seed: int) -> None:
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


PASTES = (
    "",
    "a",
    "\x1b[31m3",
    "a\x1b[A\n3",
    "\x1b",
    "\x1b3",
    "\x1b[200~3",
    "3\x1b[201",
    "\x1b]0;x\x07 3",
    "\x1b[I",
    "\x9b3",
    "3" * 5000,
)


@pytest.mark.parametrize("text", PASTES)
def test_pasted_characters_are_text(text: str) -> None:
    assert parsed(f"\x1b[200~{text}\x1b[201~q") == [f"pasted {text}", "q"]


@pytest.mark.parametrize("text", PASTES[:-1])
def test_paste_in_parts_is_one_text(text: str) -> None:
    written = f"a\x1b[200~{text}\x1b[201~q"
    for place in range(1, len(written)):
        assert parsed(written[:place], written[place:]) == ["a", f"pasted {text}", "q"], place
    assert parsed(*written) == ["a", f"pasted {text}", "q"]


def test_length_of_a_paste_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_parser, "MOST_PASTED", 100)
    for size in (7, 30, 1000):
        written = "\x1b[200~" + "x" * 150 + "3" * 1000 + "\x1b[201~q"
        parts = [written[at : at + size] for at in range(0, len(written), size)]
        assert parsed(*parts) == [f"pasted {'x' * 100}", "q"]
    parser = KeyParser()
    for part in ("\x1b[200~", *("x" * 50 for _ in range(1000))):
        assert list(parser.feed(part)) == []
        assert len(parser._pasted or "") < 200


def test_keys_before_and_after_a_paste_are_parsed_as_keys() -> None:
    both = parsed("1\x1b[200~2\x1b[201~\x1b[A\x1b[200~3\x1b[201~4", "\x1b[2", "~\x1b[20", "~5")
    assert both == ["1", "pasted 2", "up", "pasted 3", "4", "insert", "f9", "5"]


def test_incomplete_escape_sequence_is_parsed_as_keys_after_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = KeyParser()
    monkeypatch.setattr(constants, "ESCAPE_DELAY", 0.0)
    for written in ("\x1b[", "\x1b", "["):
        found = [*parser.feed(written), *parser.tick()]
        keys = [event.key for event in found if isinstance(event, Key)]
        assert (
            keys
            == {"\x1b[": ["escape", "left_square_bracket"], "\x1b": ["escape"], "[": ["left_square_bracket"]}[written]
        )
