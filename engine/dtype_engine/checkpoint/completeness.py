"""Whether a checkpoint is whole: what its index names against what its files hold, and how much of a model was found in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor, read_header
from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import reading
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.results.coverage import Coverage


@dataclass(frozen=True, slots=True)
class LeftOutFile:
    """A file of weights in the folder that the index does not name."""

    name: str
    tensors: tuple[str, ...]
    """Those of its tensors that no file of the index has."""


@dataclass(frozen=True, slots=True)
class IndexReport:
    """Where an index and the files of its folder disagree."""

    found: int
    """How many of the tensors that the index names are in its files."""
    missing: tuple[tuple[str, str], ...] = ()
    """Tensors that are in none of the files of the index, each with the file that the index names for it."""
    left_out: tuple[LeftOutFile, ...] = ()
    moved: tuple[tuple[str, str, str], ...] = ()
    """Tensors in another file of the index than it says: the name, the file it says, the file that has it."""
    unnamed: tuple[str, ...] = ()
    """Tensors of its files that the index does not name."""

    @property
    def coverage(self) -> Coverage:
        """How many tensors the files of the index have, of all that the index names and that files left out of it have."""
        beside = tuple(name for file in self.left_out for name in file.tensors)
        absent = tuple(name for name, _ in self.missing)
        return Coverage(self.found + len(absent) + len(beside), absent + beside)

    @property
    def sentences(self) -> tuple[str, ...]:
        """What disagrees, a sentence each; () where nothing does."""
        said = []
        if self.missing:
            name, file = self.missing[0]
            said.append(
                f"the index names {plural(len(self.missing), 'tensor')} that no file has, first {printable(name)}, "
                f"which should be in {printable(file)}"
            )
        for left_out in self.left_out:
            what = f"{plural(len(left_out.tensors), 'tensor')} that no other file has, first {printable(left_out.tensors[0])}"
            said += [f"the index leaves out {printable(left_out.name)}, which has {what}"]
        if self.moved:
            name, where, holder = self.moved[0]
            said.append(
                f"the index gives another file for {plural(len(self.moved), 'tensor')}, first {printable(name)}: "
                f"{printable(where)}, and {printable(holder)} has it"
            )
        return tuple(said)


def what_is_missing(
    index: IndexReport | None, coverage: Coverage | None, model: str, prefix: str = ""
) -> tuple[str, ...]:
    """Why a checkpoint is not whole, a sentence each; () where nothing is missing.

    model: the class that `coverage` is about. prefix: what stands before all names of the files and not before those of the class.
    """
    said = index.sentences[: bool(index.missing) + len(index.left_out)] if index is not None else ()
    known = set(index.coverage.missing) if index is not None else set()
    if coverage is not None and coverage.missing and not known.issuperset(coverage.missing):
        under = (
            (f"all names in the files begin with {printable(prefix)}, which those of {model} do not",) if prefix else ()
        )
        said += (*under, *coverage.sentences(model))
    return said


def compare_index(
    folder: Path, weight_map: Mapping[str, str], tensors: Mapping[str, CheckpointTensor], files: Collection[Path]
) -> IndexReport:
    """Compare an index with the tensors of the files that it names.

    A file of the folder counts as left out where its name begins as those of the index do, and it has tensors that they lack.
    """
    missing = [(name, file) for name, file in weight_map.items() if name not in tensors]
    moved = [
        (name, file, holder)
        for name, file in weight_map.items()
        if name in tensors and (holder := tensors[name].file.name) != file
    ]
    unnamed = tuple(name for name in tensors if name not in weight_map)
    known = {file.name for file in files}
    stems = tuple({name.partition("-")[0].partition(".")[0] for name in known})
    with reading(folder):
        present = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".safetensors"))
    left_out = []
    for name in present:
        if name in known or not name.startswith(stems):
            continue
        try:
            held, _ = read_header(folder / name)
        except UserError:
            continue  # it belongs to nothing that is read, so its damage is no concern here
        if beside := tuple(each for each in held if each not in tensors):
            left_out.append(LeftOutFile(name, beside))
    return IndexReport(len(weight_map) - len(missing), tuple(missing), tuple(left_out), tuple(moved), unnamed)
