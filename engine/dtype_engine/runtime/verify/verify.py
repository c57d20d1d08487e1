"""Verifies that an exported checkpoint is the source cast by its recipe, bit for bit, or is what its roundings may choose."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dtype_engine.checkpoint import Checkpoint, refuse_changed
from dtype_engine.checkpoint.kv_cache import CACHE_SCALES
from dtype_engine.checkpoint.schemes.own import SCALED_KEY
from dtype_engine.checkpoint.source import Source
from dtype_engine.core import dtypes
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.core.file_layouts import TORCHAO
from dtype_engine.core.options import Options
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.recipe.file import RecipeFile, read_recipe_file
from dtype_engine.results.export import TensorDifference, VerifyReport
from dtype_engine.runtime.export.contents import Contents, ExportTensor, TensorEntry
from dtype_engine.runtime.export.file_layout import in_layout, layout_in
from dtype_engine.runtime.export.plan import of_checkpoint
from dtype_engine.runtime.export.write import OnBytes
from dtype_engine.runtime.formats.dequantize import dtype_name, torch_dtype
from dtype_engine.runtime.verify.exported_values import ExportedValues, read_export
from dtype_engine.runtime.verify.file_layout import as_compressed_tensors, torchao_problem
from dtype_engine.runtime.verify.foreign import bits_of, count_differing
from dtype_engine.runtime.verify.independent_block_formats import finite_largest, quantize_blocks_independently
from dtype_engine.runtime.verify.independent_scales import quantize_independently
from dtype_engine.runtime.verify.rounded import problem_of_codes
from dtype_engine.runtime.verify.source_values import SourceValues, of_files, with_decoded

CompareItems = Callable[[Contents], Iterator[tuple[Sequence[int], Sequence[str | None]]]]
"""A function that compares the tensors of an export with its source in other processes. Yields pairs in any order: the indexes of
some tensors in `Contents.items`, and for each of these what is wrong with it, or None.
"""
_HEAD, _TAIL = 1 << 20, 1 << 16
"""How many bytes at the beginning of a file, which include the header, and at its end the fingerprint covers."""


@dataclass(frozen=True, slots=True)
class OpenExport:
    """An export and its source, both open for comparison."""

    contents: Contents
    """What the export should contain, planned again from the source."""
    source: SourceValues
    exported: ExportedValues
    largest: dict[tuple[str, ...], float] = field(default_factory=dict)
    """Caches the largest |value| of tensors with a common scale, keyed by their names."""

    def problems(self, indexes: Sequence[int], cancelled: IsCancelled = never) -> list[str | None]:
        """Return, for each of the tensors with these indexes in `contents.items`, what is wrong with it, or None. Raises UserError
        if a file can't be read, and Cancelled.
        """
        found = []
        for index in indexes:
            if cancelled():
                raise Cancelled
            found.append(self._difference(self.contents.items[index]))
        return found

    def shared(self, item: ExportTensor) -> float | None:
        """Return the largest finite |value| of all tensors that share a scale with a tensor, or None if it shares no scale."""
        if item.shared is None:
            return None
        names = item.shared.names
        if names not in self.largest:
            self.largest[names] = max(finite_largest(self.source.read(name)) for name in names)
        return self.largest[names]

    def _difference(self, item: ExportTensor) -> str | None:
        """Return what is wrong with one tensor of the export, compared with its plan (`item`) and its source, or None."""
        for index, entry in enumerate(item.entries):
            if entry.name not in self.exported.read:
                return "has no scales" if index else "is missing"
            held = self.exported.read[entry.name]()
            wanted = torch_dtype(entry.dtype), _torch_shape(entry)
            if (held.dtype, tuple(held.shape)) != wanted:
                return f"is {dtype_name(held.dtype)} {list(held.shape)} and should be {entry.dtype} {list(wanted[1])}"
        recorded = self.exported.metadata.get(SCALED_KEY + item.name)
        if item.has_scales and item.file_layout is None and recorded != item.dtype:
            return f"should be {item.dtype}, and the file says {recorded or 'nothing about scales'}"
        if item.file_layout is TORCHAO and (problem := torchao_problem(item, self.exported.metadata.get(item.name))):
            return problem
        missing = next((name for name in _names_read(item) if name not in self.source.names), None)
        if missing is not None:
            return f"is not in the source as {missing}"
        if item.input_scale is not None and (problem := self._scale_problem(item.entries[-1], item)):
            return problem
        stored, problem = self.stored(item)
        if problem is not None:
            return problem
        if item.rounding:
            return problem_of_codes(self.source.read(item.name), stored, item.dtype, self.shared(item))
        for entry, expected, held in zip(item.entries[: len(stored)], self._expected(item), stored, strict=True):
            if problem := _values_differ(entry, expected, held, item.stored != item.dtype):
                return problem
        return None

    def stored(self, item: ExportTensor) -> tuple[Sequence[torch.Tensor], str | None]:
        """Return (the tensors that hold a weight in the export, without the scale of its inputs, in the layout of
        compressed-tensors; what is wrong with them, or None). Each must have its planned dtype and shape.
        """
        entries = item.entries if item.input_scale is None else item.entries[:-1]
        held = [self.exported.read[entry.name]() for entry in entries]
        packed = item.file_layout is not None and item.file_layout.packed
        return as_compressed_tensors(item, held) if packed else (held, None)

    def _scale_problem(self, entry: TensorEntry, item: ExportTensor) -> str | None:
        """Return what is wrong with the exported scale of a layer's inputs (`entry`), or None. If the weight is exported as stored
        and the source has an input scale, both scales must be equal. Otherwise, the exported one must be finite and positive.
        """
        scale = self.exported.read[entry.name]()
        if item.dtype == item.stored and entry.name in self.source.names:
            return _values_differ(entry, self.source.read(entry.name), scale, False)
        valid = bool((scale > 0).all()) and bool(torch.isfinite(scale).all())
        return None if valid else f"{entry.name} is not a valid scale"

    def _expected(self, item: ExportTensor) -> tuple[torch.Tensor, ...]:
        """Compute the tensors that the export should hold for a weight from the source's values, without code of the exporter."""
        values = tuple(map(self.source.read, _names_read(item)))
        if item.copied or (item.has_scales and item.dtype == item.stored):
            return values
        if not item.has_scales:
            return (values[0].to(torch_dtype(item.dtype)),)
        if item.dtype in dtypes.BLOCK_FORMATS:
            return quantize_blocks_independently(values[0], item.dtype, self.shared(item))
        return quantize_independently(values[0], item.dtype, self.shared(item))


def open_export(folder: Path, source: Source, options: Options) -> OpenExport:
    """Open an exported folder and its source. Raises UserError if one can't be read, or if the source is no checkpoint."""
    checkpoint = source.open()
    if checkpoint is None:
        raise UserError(f"{source.title} {source.no_headers}: what it makes can only be compared in one process")
    file = read_recipe_file(folder / "recipe.yaml")
    contents = of_checkpoint(checkpoint, source.title, file.recipe, as_exported(options, file))
    contents = in_layout(contents, layout_in(folder))
    return OpenExport(contents, values_of(checkpoint, contents, source.trust_pickle), _read(folder, contents))


def fingerprint(contents: Contents, folder: Path) -> str:
    """Return a hash of an export and its source, by which workers check that they verify the same files. It covers the planned
    tensors, and the size, beginning and end of each weights file.
    """
    found = hashlib.sha256()
    for item in contents.items:
        found.update(f"{item.name} {item.shape} {item.stored} {item.dtype}\n".encode())
    for file in (*(identity.path for identity in contents.identities), *sorted(folder.rglob("*.safetensors"))):
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            found.update(f"{size}\n".encode() + opened.read(_HEAD))
            opened.seek(max(0, size - _TAIL))
            found.update(opened.read(_TAIL))
    return found.hexdigest()


def report_on(
    folder: Path,
    contents: Contents,
    source: SourceValues,
    on_bytes: OnBytes = lambda done, total: None,
    cancelled: IsCancelled = never,
    elsewhere: CompareItems | None = None,
) -> VerifyReport:
    """Compare an exported folder as `compare` does, and return a report on it, without drifts. Raises UserError, also if the
    source's files have changed meanwhile, and Cancelled.
    """
    started = time.perf_counter()
    lost = read_recipe_file(folder / "recipe.yaml").lost
    differences = compare(contents, source, folder, on_bytes, cancelled, elsewhere)
    refuse_changed(contents.identities)
    return VerifyReport(
        folder=str(folder),
        model=contents.title,
        rules=tuple(map(str, contents.recipe.rules)),
        tensors=len(contents.items),
        nbytes=contents.nbytes,
        differences=differences,
        seconds=time.perf_counter() - started,
        lost=lost,
        rounded=sum(bool(item.rounding) for item in contents.items),
        unchecked=(*source.unchecked, *_calibrated(contents), *_not_compared(folder, contents)),
    )


def compare(
    contents: Contents,
    source: SourceValues,
    folder: Path,
    on_bytes: OnBytes = lambda done, total: None,
    cancelled: IsCancelled = never,
    elsewhere: CompareItems | None = None,
) -> tuple[TensorDifference, ...]:
    """Return the differences between the export in `folder` and `contents`, of which only names, dtypes and shapes are used. The
    expected values are computed from the source without the code of the exporter, with `Tensor.to` or, for formats with scales, by
    their formula.

    on_bytes: called with the number of bytes compared until now and the number of all bytes. elsewhere: compares the tensors in
    other processes. Raises UserError if a file can't be read, and Cancelled.
    """
    exported = _read(folder, contents)
    opened = OpenExport(contents, source, exported)

    def here(contents: Contents) -> Iterator[tuple[Sequence[int], Sequence[str | None]]]:
        for index in range(len(contents.items)):
            yield [index], opened.problems([index], cancelled)

    done = 0
    problems: dict[int, str | None] = {}
    for indexes, found in (elsewhere or here)(contents):
        problems.update(zip(indexes, found, strict=True))
        done += sum(contents.items[index].nbytes for index in indexes)
        on_bytes(done, contents.nbytes)
    differences = [TensorDifference(name, problem) for name, problem in exported.misplaced.items()]
    for index, item in enumerate(contents.items):
        if (problem := problems[index]) is not None:
            differences.append(TensorDifference(item.name, problem))
    entries = {entry.name for item in contents.items for entry in item.entries}
    beyond = [name for name in exported.read if name not in entries and not name.endswith(CACHE_SCALES)]
    differences += [TensorDifference(name, "is not in the source") for name in beyond]
    differences += [TensorDifference(path, problem) for path, problem in contents.layout.differences(folder)]
    return (*differences, *_lost(contents, source))


def as_exported(options: Options, file: RecipeFile) -> Options:
    """Return the options with the run settings that an export's recipe file names."""
    return options if file.settings is None else dataclasses.replace(options, settings=file.settings)


def values_of(checkpoint: Checkpoint, contents: Contents, trust: bool) -> SourceValues:
    """Return the values of the checkpoint of which an export with these contents was made, read by other loaders than the
    exporter's. trust: whether a pickle may run any code. Raises UserError if a file can't be read.
    """
    names = frozenset(item.name for item in contents.items)
    values = of_files(checkpoint.files, names, trust, checkpoint.form == "diffusers")
    decoded = {item.name: item.coded for item in contents.items if item.coded is not None and not item.copied}
    if checkpoint.in_config:
        values = dataclasses.replace(values, names=values.names - checkpoint.in_config)
    return with_decoded(values, decoded, checkpoint.renamed) if decoded or checkpoint.renamed else values


def _read(folder: Path, contents: Contents) -> ExportedValues:
    return read_export(folder, frozenset(path for _, path in contents.layout.copied))


def _lost(contents: Contents, source: SourceValues) -> list[TensorDifference]:
    """Return a finding for each tensor of the source that the export lacks. A tensor may be missing if it is tied to a written one
    and has the same values.
    """
    written = {item.name for item in contents.items} | {entry.name for item in contents.items for entry in item.entries}
    differences = []
    for name in sorted(source.names - written):
        written_as = contents.tied.get(name)
        if written_as is None:
            differences.append(TensorDifference(name, "is in the source and not in the export"))
        elif written_as in source.names and not _same_bits(source.read(name), source.read(written_as)):
            differences.append(
                TensorDifference(name, f"was left out as identical to {written_as}, but differs from it")
            )
    return differences


def _names_read(item: ExportTensor) -> tuple[str, ...]:
    if item.copied or (item.has_scales and item.dtype == item.stored):
        entries = item.entries if item.input_scale is None else item.entries[:-1]
        return tuple(entry.name for entry in entries)
    return (item.name,)


def _torch_shape(entry: TensorEntry) -> tuple[int, ...]:
    halved = entry.dtype == "float4_e2m1fn_x2" and entry.shape
    return (*entry.shape[:-1], entry.shape[-1] // 2) if halved else entry.shape


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(bits_of(one), bits_of(other))


def _values_differ(entry: TensorEntry, expected: torch.Tensor, stored: torch.Tensor, cast: bool) -> str | None:
    """Return a sentence that says how many elements of two tensors differ, or None if none do. expected, stored: the tensor
    computed from the source, and the exported one. cast: whether the tensor was cast, so that all bit patterns of NaN count as
    equal.
    """
    if expected.numel() != stored.numel() or expected.dtype != stored.dtype:
        return f"{entry.name} has {plural(expected.numel(), 'value')} in the source"
    elements = count_differing(expected, stored, nan_is_equal=cast)
    return f"{elements} of {expected.numel()} values of {entry.name} differ" if elements else None


def _calibrated(contents: Contents) -> tuple[str, ...]:
    """Return a notice if there are scales of activations, which come from calibration inputs and can't be recomputed, else ()."""
    count = sum(item.input_scale is not None and item.dtype != item.stored for item in contents.items)
    if not count:
        return ()
    return (
        f"{count} scales of activations come from calibration inputs: only whether they are positive and finite was checked",
    )


def _not_compared(folder: Path, contents: Contents) -> tuple[str, ...]:
    """Return a notice with the files that were not compared, because they are neither weights nor copies from the source, or ()."""
    known = {"README.md", "recipe.yaml", *(path for _, path in contents.layout.copied)}
    others = sorted(
        printable(str(entry.relative_to(folder)))
        for entry in folder.rglob("*")
        if entry.is_file()
        and entry.relative_to(folder).as_posix() not in known
        and not entry.name.endswith((".safetensors", ".safetensors.index.json"))
    )
    if not others:
        return ()
    shown = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
    return (f"other files than weights were not compared: {shown}",)
