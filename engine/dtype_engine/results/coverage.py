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
    """The name in the files or, if loading packs several tensors, such as a layer's experts, the name of the packed tensor."""
    stored: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which of a model's tensors are in its files. The tensors are those of its architecture or of the checkpoint's index."""

    expected: int
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    """The tensors of the files that the model does not use."""
    misshapen: tuple[Misshapen, ...] = ()
    integers: tuple[str, ...] = ()
    """Plain tensors of the files that hold integers where the model has floats."""

    @property
    def found(self) -> int:
        return self.expected - len(self.missing)

    def __str__(self) -> str:
        return f"{self.found:,} of {plural(self.expected, 'tensor')} found"

    def sentences(self, model: str) -> tuple[str, ...]:
        """Return a sentence about missing tensors and one about unused tensors, if there are any. model: the name of the model's
        class.
        """
        said = (("has {} that the files lack", self.missing), ("has no place for {} of the files", self.unused))
        return tuple(
            f"{model} {words.format(plural(len(names), 'tensor'))}, first {printable(names[0])}"
            for words, names in said
            if names
        )

    def of_shapes(self, model: str) -> tuple[str, ...]:
        """Return a sentence if tensors have another shape in the model, otherwise (). model: the name of the model's class."""
        if not self.misshapen:
            return ()
        first, count = self.misshapen[0], len(self.misshapen)
        many = (f"{count:,} tensors have other shapes, first " if count > 1 else "") + printable(first.name)
        return (
            f"config.json makes a {model} in which {many}: it is {list(first.expected)} there, and {list(first.stored)} in the "
            "files",
        )


def common_prefix(names: Sequence[str]) -> str:
    """Return the first part that all dotted names have in common, with its dot, such as "model.", or ""."""
    firsts = {name.partition(".")[0] for name in names if "." in name}
    return f"{firsts.pop()}." if len(firsts) == 1 and all("." in name for name in names) else ""
