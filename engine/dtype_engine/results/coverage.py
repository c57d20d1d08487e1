"""How many of a model's tensors its files contain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtype_engine.core.text import printable
from dtype_engine.core.units import plural


@dataclass(frozen=True, slots=True)
class Misshapen:
    """A tensor whose shape in the files is not the one that the configuration gives it."""

    name: str
    """The name of the tensor in the files. If loading packs several tensors into one, such as all experts of a layer, it may be the
    name of the packed tensor.
    """
    stored: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which of a model's tensors are in its files. The tensors of the model are known from its architecture or from the
    checkpoint's index.
    """

    expected: int
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    """The tensors of the files that the model does not use."""
    misshapen: tuple[Misshapen, ...] = ()
    """The tensors of the files that have another shape in the model."""

    @property
    def found(self) -> int:
        """How many of the expected tensors are in the files."""
        return self.expected - len(self.missing)

    def __str__(self) -> str:
        return f"{self.found:,} of {plural(self.expected, 'tensor')} found"

    def sentences(self, model: str) -> tuple[str, ...]:
        """Return sentences for the user: one if the files lack tensors of the model, and one if they have tensors that the model
        does not use. Returns () if there are neither. model: the name of the model class.
        """
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

    def of_shapes(self, model: str) -> tuple[str, ...]:
        """Return a sentence for the user if tensors of the files have another shape in the model; otherwise (). model: the name of
        the model class.
        """
        if not self.misshapen:
            return ()
        first, count = self.misshapen[0], len(self.misshapen)
        many = (
            f"{count:,} tensors have other shapes, first {printable(first.name)}"
            if count > 1
            else printable(first.name)
        )
        return (
            f"config.json makes a {model} in which {many}: it is {list(first.expected)} there, and {list(first.stored)} in the "
            "files",
        )


def common_prefix(names: Sequence[str]) -> str:
    """Return the first part that all dotted names have in common, with its dot, such as "model." for names like
    "model.norm.weight". Returns "" if the names begin with different parts.
    """
    firsts = {name.partition(".")[0] for name in names if "." in name}
    return f"{firsts.pop()}." if len(firsts) == 1 and all("." in name for name in names) else ""
