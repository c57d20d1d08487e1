"""A limit on the objects that a pickle creates. One byte of a pickle can create an object of sixty bytes, so a small file could
exhaust the memory. This module never imports torch.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import open_regular

MOST_OPCODES = 5_000_000
"""Steps of one pickle. A state dict takes about 45 for a tensor, so this is enough for more than 100,000 of them."""
_LEGACY_PICKLES = 5
"""torch's format before zip archives: a magic number, a version, the machine, the object, the keys of its storages; then these."""


class TooManyOpcodes(Exception):
    """A pickle has more steps than `MOST_OPCODES`."""

    def __init__(self) -> None:
        super().__init__(
            f"its pickle has over {MOST_OPCODES:,} steps, far more than names of tensors take; it is not read"
        )


def some_opcodes(pickled: bytes | BinaryIO) -> Iterator[tuple[Any, Any, int | None]]:
    """The steps of a pickle, as `pickletools.genops` yields them. Raises TooManyOpcodes, and the errors of genops for damage."""
    for count, step in enumerate(pickletools.genops(pickled)):
        if count > MOST_OPCODES:
            raise TooManyOpcodes
        yield step


def check_legacy(path: Path) -> None:
    """Check a file of torch's old format, or any bare pickle, for its number of steps.

    Damage is left to torch's reader, which reports it. Raises UserError for too many steps, and OSError.
    """
    with open_regular(path) as file:
        for _ in range(_LEGACY_PICKLES):
            try:
                for _ in some_opcodes(file):
                    pass
            except TooManyOpcodes as error:
                raise UserError(f"{path}: {error}") from None
            except OSError:
                raise
            except Exception:
                return
