"""Parses the terminal's bytes as Textual does, except for pastes, and for Escape followed by a character in a single write."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from textual.events import Key, Paste
from textual.message import Message

from dtype_tui.process.textual_private import XTermParser, expects_more

_BEGINS_MORE = "[O]PX^_"
"""Characters that begin a control sequence after Escape (ECMA-48: CSI, SS3, OSC, DCS, SOS, PM, APC)."""
_WORD_KEYS = ("\x1bb", "\x1bf")
"""What terminals send for Alt with the left or right arrow key."""
_PASTE, _PASTE_END = "\x1b[200~", "\x1b[201~"
"""What terminals send before and after a paste."""
MOST_PASTED = 4 << 20
"""Maximum number of characters that are kept of a paste, because its end may never arrive."""


class KeyParser(XTermParser):
    """Parses Escape and a character that arrive together: as Alt with the character if it is a letter, otherwise as two keys.

    Textual's own parser waits 0.1 s for more bytes. If an arrow key or a reply of the terminal arrives meanwhile, that parser turns
    Escape and the character into text (`^q`). It also turns Escape and a digit into a special character, such as `¡`.

    A paste becomes a single `Paste` with its whole text. Textual's parser would turn escape sequences in a paste, and the text
    after unknown ones, into keys.
    """

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
        self._pasted: str | None = None
        """The part of a paste that has arrived, or None if no paste is arriving."""
        self._begun = ""
        """The last characters of the input, such as Escape and `[20`, if they may begin a paste, until the next characters decide.
        Only Escape has been passed to Textual's parser, which reports the key Escape if nothing follows.
        """

    def feed(self, data: str) -> Iterable[Message]:
        if not data:  # this ends the parser
            yield from super().feed(data)
        known = len(self._begun[:1])
        data, self._begun = self._begun + data, ""
        while data:
            if self._pasted is not None:
                begin = max(0, len(self._pasted) - len(_PASTE_END))  # the end may arrive in two parts
                self._pasted += data
                end = self._pasted.find(_PASTE_END, begin)
                if end < 0:
                    if len(self._pasted) > MOST_PASTED:
                        self._pasted = self._pasted[:MOST_PASTED] + self._pasted[1 - len(_PASTE_END) :]
                    return
                pasted, data = self._pasted[:end], self._pasted[end + len(_PASTE_END) :]
                self._pasted = None
                yield Paste(pasted[:MOST_PASTED].replace("\0", ""))
                continue
            keys, paste, data = data.partition(_PASTE)
            if paste:
                self._pasted = ""
            else:
                size = next((size for size in range(len(_PASTE) - 1, 0, -1) if keys.endswith(_PASTE[:size])), 0)
                self._begun = keys[len(keys) - size :]
                keys = keys[: len(keys) - max(0, size - 1)]
            if keys[known:]:
                yield from super().feed(keys[known:])
            elif paste and known and not keys:
                deque(super().feed(_PASTE[1:] + _PASTE_END), maxlen=0)  # takes the Escape from Textual's parser
            known = 0

    def tick(self) -> Iterable[Message]:
        yield from super().tick()
        if not expects_more(self) and len(self._begun) <= 2:  # no key sends more than this of `_PASTE`
            rest, self._begun = self._begun[1:], ""
            if rest:
                yield from super().feed(rest)

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
