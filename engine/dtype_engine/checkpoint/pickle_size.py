"""Limits the objects that a pickle may create: one byte of it can create an object of sixty bytes. torch is not imported."""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dtype_engine.checkpoint.file_kind import LEGACY_START
from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import open_regular

MOST_OPCODES = 5_000_000
"""The most opcodes in one pickle. A state dict has about 45 per tensor, so this allows more than 100,000 tensors."""
_LEGACY_PICKLES = 5
"""The number of pickles before the raw bytes of torch's old format: magic number, version, machine, object and storage keys."""


class TooManyOpcodes(Exception):
    """Raised for a pickle with more opcodes than `MOST_OPCODES`."""

    def __init__(self) -> None:
        super().__init__(
            f"its pickle has over {MOST_OPCODES:,} steps, far more than names of tensors take; it is not read"
        )


def some_opcodes(pickled: bytes | BinaryIO) -> Iterator[tuple[Any, Any, int | None]]:
    """Yield (opcode, argument, position) as `pickletools.genops` does. Raises TooManyOpcodes, and ValueError for a damaged
    pickle.
    """
    for count, step in enumerate(pickletools.genops(pickled)):
        if count > MOST_OPCODES:
            raise TooManyOpcodes
        yield step


def cut_in_pickle(path: Path) -> UserError:
    """Return the error for a file that ends in the middle of its pickle."""
    return UserError(f"{path} is cut short: it ends in the middle of its pickle; copy or download it again")


def check_legacy(path: Path) -> None:
    """Check a file that begins with a pickle, as in torch's old format. Raises UserError if a pickle has too many opcodes or the
    file ends in the middle of it, and OSError for an unreadable file. torch's reader reports other damage later.
    """
    with open_regular(path) as file:
        legacy = file.read(len(LEGACY_START)) == LEGACY_START
        file.seek(0)
        for number in range(_LEGACY_PICKLES):
            try:
                for _ in some_opcodes(file):
                    pass
            except TooManyOpcodes as error:
                raise UserError(f"{path}: {error}") from None
            except OSError:
                raise
            except Exception:
                if (legacy or number == 0) and not file.read(1):
                    raise cut_in_pickle(path) from None
                return
