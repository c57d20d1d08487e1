"""Compares a checkpoint that another program wrote with the checkpoint from which it was made (the source): which tensors are exact
casts to their dtype, and how far the others differ.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dtype_engine.checkpoint import Checkpoint, open_checkpoint, unchanged
from dtype_engine.checkpoint.packed_weights import packed_weights, quantized_parts
from dtype_engine.checkpoint.source import Source
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import ModelOptions
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree
from dtype_engine.results.export import CastReport, ComparedTensor, TensorDifference
from dtype_engine.runtime.building.describe import describe
from dtype_engine.runtime.building.load import load
from dtype_engine.runtime.export.write import OnBytes
from dtype_engine.runtime.formats.dequantize import dtype_name, torch_dtype
from dtype_engine.runtime.verify.source_values import SourceValues, of_files, of_module
from dtype_engine.runtime.weights.checkpoint_weights import source_of

_AT_ONCE = 1 << 22
"""Number of elements that are compared at once. Their values take eight bytes each."""
_PART = "part of a weight that is "


@dataclass(frozen=True, slots=True)
class _Side:
    """The tensors of one of the two checkpoints, keyed by their names in this checkpoint."""

    stored: Mapping[str, tuple[str, tuple[int, ...]]]
    """The stored dtype, a name in `core.dtypes` or a block format of GGUF, and the shape of each tensor."""
    read: Callable[[str], torch.Tensor]
    unchecked: tuple[str, ...] = ()
    decoded: frozenset[str] = frozenset()
    """The tensors whose values `read` computes from codes and scales, or from blocks of GGUF."""
    parts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The stored tensors of weights that this program can't decode, keyed by name: (the weight's name before it was quantized, a
    phrase that describes the tensor).
    """


def _of_checkpoint(checkpoint: Checkpoint, trust: bool) -> _Side:
    """Open a checkpoint for the comparison. Plain tensors are read with loaders of other packages, codes are decoded. trust:
    whether a pickle may run any code. Raises UserError if a file can't be read.
    """
    weights = checkpoint.weights
    checkpoint.need_values()
    values = of_files(checkpoint.files, frozenset(weights), trust, checkpoint.form == "diffusers")
    reasons = quantized_parts(checkpoint.unread, checkpoint.config)
    stored = {name: (checkpoint.dtype(name), tensor.shape) for name, tensor in weights.items()}
    of_part = {name: weight.name for weight in packed_weights(checkpoint.unread) for name in weight.names}
    decoded = checkpoint.coded.keys()
    in_files = {name: own for own, name in checkpoint.renamed.items()} | dict(checkpoint.aliases)

    def read(name: str) -> torch.Tensor:
        return source_of(checkpoint, name).read() if name in decoded else values.read(in_files.get(name, name))

    blocks = {name for name, tensor in weights.items() if tensor.packed}
    parts = {name: (of_part.get(name, name), why.removeprefix(_PART)) for name, why in reasons.items()}
    return _Side(stored, read, (), frozenset(blocks | decoded), parts)


def _of_values(values: SourceValues) -> _Side:
    tensors = {name: values.read(name) for name in values.names}
    stored = {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    return _Side(stored, values.read, values.unchecked)


def compare_foreign(
    path: Path, source: Source, options: ModelOptions, on_bytes: OnBytes = lambda done, total: None
) -> CastReport:
    """Compare each tensor of the checkpoint at `path`, a folder or a file, with the tensor of the same name in `source`. Weights
    that the architecture ties are compared under any of their names.

    on_bytes: called with the number of bytes compared until now and the number of all bytes. Raises UserError if the checkpoint or
    the source can't be read, or if they have no name in common.
    """
    started = time.perf_counter()
    other, checkpoint = open_checkpoint(path, options.trust_pickle), source.open()
    identities = (*other.identities, *(checkpoint.identities if checkpoint is not None else ()))
    with unchanged(identities):
        theirs = _of_checkpoint(other, options.trust_pickle)
        if checkpoint is not None:
            ours = _of_checkpoint(checkpoint, options.trust_pickle)
        else:
            ours = _of_values(of_module(load(source, options).module))
        pairs = _Pairs(theirs, ours, describe(source, options, checkpoint).tree)
        if not pairs.same and not pairs.undecoded:
            mapped = (other.form == "gguf") == (checkpoint is not None and checkpoint.form == "gguf")
            raise _nothing_in_common(f"{path} and {source.title}", theirs, ours, mapped)
        sizes = {name: _nbytes(*theirs.stored[name]) for name in pairs.same}
        whole = sum(sizes.values())
        tensors, differences, undecoded = list[ComparedTensor](), list[TensorDifference](), dict(pairs.undecoded)
        done = 0
        for name, found in pairs.same.items():
            if (shape := theirs.stored[name][1]) != (wanted := ours.stored[found][1]):
                differences.append(TensorDifference(name, f"is {list(shape)}, and {list(wanted)} in the source"))
            else:
                try:
                    tensors.append(_compare(name, found, theirs, ours))
                except NotImplementedError:  # torch does not convert float4_e2m1fn_x2
                    undecoded[name] = f"{theirs.stored[name][0]}, and {ours.stored[found][0]} in the source"
            done += sizes[name]
            on_bytes(done, whole)
        differences += pairs.only_in_source()
    differences += [TensorDifference(name, "is not in the source") for name in pairs.extra]
    return CastReport(
        folder=str(path),
        model=source.title,
        nbytes=whole,
        tensors=tuple(tensors),
        differences=tuple(differences),
        uncompared=tuple(TensorDifference(name, f"is {what}") for name, what in undecoded.items()),
        seconds=time.perf_counter() - started,
        unchecked=ours.unchecked,
    )


def _nothing_in_common(titles: str, theirs: _Side, ours: _Side, mapped: bool) -> UserError:
    """Return the error for two checkpoints (`titles`) without a common name. mapped: False if only one has llama.cpp's names."""
    why = (
        ", so there is nothing to compare"
        if mapped
        else ": GGUF has llama.cpp's names, which are not mapped to those of transformers yet"
    )
    return UserError(
        f"{titles} have no tensor's name in common{why}; the first names are "
        f"{printable(next(iter(theirs.stored)))} and {printable(next(iter(ours.stored)))}"
    )


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a stored tensor without scales. For a block format of GGUF, 8 bits per element are assumed."""
    row = dtypes.BY_NAME.get(dtype)
    return math.prod(shape) * (row.bits if row is not None else 8) // 8


class _Pairs:
    """Assigns to each tensor of the checkpoint (`theirs`) the tensor of the source (`ours`) with which it is compared.

    same: the tensor's name in the source, keyed by its name in the checkpoint. extra: names of the checkpoint that the source
    lacks. undecoded: phrases about the weights that this program can't decode in the checkpoint or in the source, keyed by name.
    """

    def __init__(self, theirs: _Side, ours: _Side, tree: Tree) -> None:
        self._theirs, self._ours, self._tree = theirs, ours, tree
        self.same: dict[str, str] = {}
        unknown = []
        for name in theirs.stored:
            found = self._name_in(ours, name)
            if found is None:
                unknown.append(name)
            elif theirs.stored[name] == ours.stored[found] or not (name in theirs.parts or found in ours.parts):
                self.same[name] = found
        kept = set(self.same.values())
        self.undecoded = {weight: what for name, (weight, what) in theirs.parts.items() if name not in self.same}
        for name, (weight, what) in ours.parts.items():
            if name not in kept and weight in theirs.stored:
                self.undecoded.setdefault(weight, f"{what} in the source")
        self.extra = [name for name in unknown if name not in theirs.parts and name not in self.undecoded]

    def _name_in(self, side: _Side, name: str) -> str | None:
        """Return the name of a tensor in `side`, which may be another name of the same tied weight, or None if `side` lacks it."""
        info = self._tree.canonical(name)
        return next((each for each in (name, *(info.names if info is not None else ())) if each in side.stored), None)

    def only_in_source(self) -> list[TensorDifference]:
        """Return a finding for each tensor of the source that the checkpoint lacks under all of its names."""
        ours, kept, found = self._ours, set(self.same.values()), []
        for name in ours.stored:
            weight = ours.parts[name][0] if name in ours.parts else name
            if name in kept or weight in self.undecoded:
                continue
            if self._name_in(self._theirs, name) not in self.same:
                found.append(TensorDifference(name, "is in the source alone"))
        return found


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor: uint8 [elements, bytes of an element]."""
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).view(-1, tensor.element_size())


def _compare(name: str, found: str, theirs: _Side, ours: _Side) -> ComparedTensor:
    """Compare a tensor with that of the source, some elements at a time. Count the elements that differ after the source's are
    cast to the tensor's dtype, and find the largest difference without this cast. name, theirs: the tensor's name in the
    checkpoint, and the checkpoint. found, ours: the same for the source.
    """
    (dtype, _), (source_dtype, _) = theirs.stored[name], ours.stored[found]
    before, after = ours.read(found).reshape(-1), theirs.read(name).reshape(-1)
    target = None if name in theirs.decoded else torch_dtype(dtype)
    if name in theirs.decoded and found in ours.decoded and dtype == source_dtype:
        target = after.dtype  # blocks or codes of one format, whose values can be equal
    differing, largest = 0, 0.0
    for start in range(0, len(after), _AT_ONCE):
        old, new = before[start : start + _AT_ONCE], after[start : start + _AT_ONCE]
        if target is not None:
            cast = old.to(target).to(new.dtype)  # a reader may widen, as that of GGUF does bfloat16
            differing += count_differing(cast, new, nan_is_equal=True)
        largest = max(largest, _largest_difference(old, new))
    return ComparedTensor(name, source_dtype, dtype, len(after), differing if target is not None else None, largest)


def count_differing(one: torch.Tensor, other: torch.Tensor, nan_is_equal: bool) -> int:
    """Return how many elements of two tensors of the same dtype differ in their bits. nan_is_equal: whether all NaN are equal."""
    differing = (bits_of(one) != bits_of(other)).any(dim=1)
    if nan_is_equal and one.is_floating_point() and bool(differing.any()):
        nan = torch.isnan(one.to(torch.float32)).reshape(-1) & torch.isnan(other.to(torch.float32)).reshape(-1)
        differing &= ~nan
    return int(differing.sum())


def _largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest |Δ| in float64. It is infinite if the tensors differ where one is not finite."""
    if one.dtype == other.dtype and torch.equal(bits_of(one), bits_of(other)):
        return 0.0
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    off = (one - other).abs()
    off[(one == other) | (torch.isnan(one) & torch.isnan(other))] = 0
    return float(off.nan_to_num(nan=torch.inf, posinf=torch.inf).max()) if len(off) else 0.0
