"""What the terminal's bytes are: Textual's parser, but for Escape and a character in one write."""

from __future__ import annotations

from collections.abc import Iterable

from textual._xterm_parser import XTermParser
from textual.drivers import linux_driver
from textual.events import Key

_BEGINS_MORE = "[O]PX^_"
"""After Escape these begin what a terminal itself sends (ECMA-48: CSI, SS3, OSC, DCS, SOS, PM, APC)."""
_WORD_KEYS = ("\x1bb", "\x1bf")
"""What terminals send for Alt and an arrow key."""


class KeyParser(XTermParser):
    """Textual waits 0.1 s for what may follow Escape and a character. An arrow key, or the answer to a question, that arrives
    meanwhile turned both into text: `^q`. Escape and a digit were a character of another keyboard, such as `¡`.
    """

    def _sequence_to_key_events(self, sequence: str, alt: bool = False) -> Iterable[Key]:
        if len(sequence) != 2 or sequence[0] != "\x1b" or sequence in _WORD_KEYS:
            return super()._sequence_to_key_events(sequence, alt)
        character = sequence[1]
        if not character.isprintable() or character in _BEGINS_MORE:
            return super()._sequence_to_key_events(sequence, alt)
        if character.isalpha():
            # Alt and a letter are a key of their own; where nothing is bound to it, the app takes it apart.
            return super()._sequence_to_key_events(character, alt=True)
        return (Key("escape", "\x1b"), *super()._sequence_to_key_events(character))


def install_key_parser() -> None:
    """Let Textual's driver for terminals parse with this: it makes its parser by that name, in the thread that reads."""
    linux_driver.XTermParser = KeyParser  # type: ignore[attr-defined]
