"""Which bytes of a model's weights are read to generate one token: the active bytes. `checkpoint/token_reads.py` finds them.

A dense model reads all its weights but the tables of embeddings, of which it reads a row. A mixture of experts reads some of its
experts. The share of a tensor is the expected part of its bytes that a token reads, where a router sends tokens to all experts
alike. Where all experts of a layer have one format, the result does not depend on that.
"""

from __future__ import annotations

import msgspec

from dtype_engine.core.text import Name


class ReadPart(msgspec.Struct, frozen=True):
    """A module, with all below it, or a tensor, of which a token does not read all bytes, or reads all inside another part."""

    name: Name
    read: int
    """The expected share of its bytes is `read / of`: 2 / 8 for 2 of 8 experts, 1 / rows for a row of a table, 0 / 1 for none."""
    of: int
    routed: bool = False
    """Whether the part is experts to which a router sends tokens."""


class TokenReads(msgspec.Struct, frozen=True):
    """What a model reads of its weights to generate one token. All that `parts` does not name is read whole."""

    parts: tuple[ReadPart, ...] = ()
    """A part inside another one follows it, and decides. A tensor with several names is read as by the name with most bytes."""
    none_because: str | None = None
    """Why the active bytes are unknown, as a clause for the user, or None if they are known."""
    routed: tuple[int, int] | None = None
    """(experts for each token, experts in a layer) of the mixture's first layer. None for other models."""
    by_row: bool = True
    """Whether a token reads one row of the table of embeddings, rather than all of it as the output head."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about what is not read, and about what is not known."""

    @property
    def words(self) -> str:
        """What is read, for the user, such as `2 of 8 experts of each layer, and all else but the embedding table`."""
        chosen = "" if self.routed is None else f"{self.routed[0]} of {self.routed[1]} experts of each layer, "
        rest = "all else" if chosen else "all"
        return f"{chosen}{rest}{' but the embedding table' if self.by_row else ', with the embedding table as output head'}"


UNKNOWN = TokenReads(none_because="nothing says what the model's code does")


def rounded_bytes(units: int, of_byte: int) -> int:
    """Return a number of units as bytes, rounded to the nearest. of_byte: how many units make a byte."""
    return (2 * units + of_byte) // (2 * of_byte)


def most_units(nbytes: int, of_byte: int) -> int:
    """Return the largest number of units that `rounded_bytes` makes `nbytes` or less."""
    return (2 * nbytes * of_byte + of_byte - 1) // 2
