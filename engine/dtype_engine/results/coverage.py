"""How much of a model was found in its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtype_engine.core.text import printable
from dtype_engine.core.units import plural


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many tensors of a model, or of an index, the files have."""

    expected: int
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    """Tensors of the files that the model has no place for."""

    @property
    def found(self) -> int:
        """How many of the expected tensors the files have."""
        return self.expected - len(self.missing)

    def __str__(self) -> str:
        return f"{self.found:,} of {plural(self.expected, 'tensor')} found"

    def sentences(self, model: str) -> tuple[str, ...]:
        """What was not found and what has no place in `model`, a sentence each; () where there is neither."""
        said = []
        if self.missing:
            said.append(
                f"{model} has {plural(len(self.missing), 'tensor')} that the files lack, first {printable(self.missing[0])}"
            )
        if self.unused:
            said.append(
                f"{model} has no place for {plural(len(self.unused), 'tensor')} of the files, first {printable(self.unused[0])}"
            )
        return tuple(said)


def common_prefix(names: Sequence[str]) -> str:
    """The first part of all these names and its dot; "" where they have several first parts."""
    firsts = {name.partition(".")[0] for name in names if "." in name}
    return f"{firsts.pop()}." if len(firsts) == 1 and all("." in name for name in names) else ""
