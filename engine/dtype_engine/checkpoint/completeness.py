"""Checks that a checkpoint is complete: compares its index with its files, and names the tensors of the model that are missing."""

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
    """A weights file in the checkpoint's folder that the checkpoint's index does not name."""

    name: str
    tensors: tuple[str, ...]
    """Names of this file's tensors that are in none of the files that the index names."""


@dataclass(frozen=True, slots=True)
class IndexReport:
    """How a checkpoint's index (such as `model.safetensors.index.json`) differs from the files in its folder."""

    name: str
    found: int
    """How many of the tensors that the index lists are in one of the files that the index names."""
    missing: tuple[tuple[str, str], ...] = ()
    """(tensor name, file name in the index) of each tensor that the index lists, but that is in none of its files."""
    left_out: tuple[LeftOutFile, ...] = ()
    moved: tuple[tuple[str, str, str], ...] = ()
    """(tensor name, file name in the index, name of the file that has it) of each tensor that is not in the file of the index."""
    unnamed: tuple[str, ...] = ()
    """Names of the tensors that the index does not list, although they are in a file that the index names."""

    @property
    def coverage(self) -> Coverage:
        """Which of the tensors in the index and in the left-out files are in the files that the index names."""
        beside = tuple(name for file in self.left_out for name in file.tensors)
        absent = tuple(name for name, _ in self.missing)
        return Coverage(self.found + len(absent) + len(beside), absent + beside)

    @property
    def sentences(self) -> tuple[str, ...]:
        """Sentences for the user about the differences between the index and the files."""
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
    """Return sentences for the user about the tensors that a checkpoint lacks, or whose shapes differ from those in its model.
    coverage: which of the model's tensors are in the files. model: the class of the model. prefix: the prefix that all names in the
    files have and the model's names lack, or "".
    """
    said = index.sentences[: bool(index.missing) + len(index.left_out)] if index is not None else ()
    known = set(index.coverage.missing) if index is not None else set()
    if coverage is not None and coverage.missing and not known.issuperset(coverage.missing):
        under = (
            (f"all names in the files begin with {printable(prefix)}, which those of {model} do not",) if prefix else ()
        )
        said += (*under, *coverage.sentences(model))
    if coverage is not None:
        said += coverage.of_shapes(model)
    return said


def compare_index(
    folder: Path,
    name: str,
    weight_map: Mapping[str, str],
    tensors: Mapping[str, CheckpointTensor],
    files: Collection[Path],
) -> IndexReport:
    """Return the differences between an index and the tensors in `files`, the files that the index names. name: the index's file
    name. weight_map: its content. tensors: all tensors in `files`. Another file in the folder counts as left out if its name begins
    with the same word as one of `files`, and it holds tensors that these files lack.
    """
    missing = [(tensor, file) for tensor, file in weight_map.items() if tensor not in tensors]
    moved = [
        (tensor, file, holder)
        for tensor, file in weight_map.items()
        if tensor in tensors and (holder := tensors[tensor].file.name) != file
    ]
    unnamed = tuple(tensor for tensor in tensors if tensor not in weight_map)
    known = {file.name for file in files}
    stems = tuple({name.partition("-")[0].partition(".")[0] for name in known})
    with reading(folder):
        present = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".safetensors"))
    left_out = []
    for file_name in present:
        if file_name in known or not file_name.startswith(stems):
            continue
        try:
            held, _ = read_header(folder / file_name)
        except UserError:
            continue  # it belongs to nothing that is read, so its damage is no concern here
        if beside := tuple(each for each in held if each not in tensors):
            left_out.append(LeftOutFile(file_name, beside))
    return IndexReport(name, len(weight_map) - len(missing), tuple(missing), tuple(left_out), tuple(moved), unnamed)
