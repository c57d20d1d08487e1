"""Parses the terminal's bytes as Textual does, except for Escape and a character that arrive together, which Textual turns into
text or another character.
"""

from __future__ import annotations

from collections.abc import Iterable

from textual._xterm_parser import XTermParser
from textual.drivers import linux_driver
from textual.events import Key

_BEGINS_MORE = "[O]PX^_"
"""Characters that, after Escape, begin a control sequence of the terminal (ECMA-48: CSI, SS3, OSC, DCS, SOS, PM, APC)."""
_WORD_KEYS = ("\x1bb", "\x1bf")
"""The bytes that terminals send for Alt with the left or right arrow key."""


class KeyParser(XTermParser):
    """Parses Escape and a character that arrive together: as Alt with the character if it is a letter, otherwise as two keys.

    If Escape and a character arrive together, Textual's parser waits 0.1 s for more bytes. If an arrow key or a reply of the
    terminal arrives within that time, Textual's parser turns Escape and the character into text (`^q`). It turns Escape and a digit
    into a character of another keyboard, such as `¡`.
    """

    def _sequence_to_key_events(self, sequence: str, alt: bool = False) -> Iterable[Key]:
        if len(sequence) != 2 or sequence[0] != "\x1b" or sequence in _WORD_KEYS:
            return super()._sequence_to_key_events(sequence, alt)
        character = sequence[1]
        if not character.isprintable() or character in _BEGINS_MORE:
            return super()._sequence_to_key_events(sequence, alt)
        if character.isalpha():
            # This may be Alt with a letter. If nothing is bound to that, the app splits it into Escape and the letter.
            return super()._sequence_to_key_events(character, alt=True)
        return (Key("escape", "\x1b"), *super()._sequence_to_key_events(character))


def install_key_parser() -> None:
    """Make Textual's terminal driver use `KeyParser`. The driver looks its parser up by name when its reader thread starts."""
    linux_driver.XTermParser = KeyParser  # type: ignore[attr-defined]
