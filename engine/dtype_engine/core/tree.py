"""A model's modules and tensors as a tree, which the screen shows and patterns are matched against.

A checkpoint's first tree is built from its headers (`from_tensors`), without module classes. Once the model is in memory, a
second tree is built from it (`runtime.model.live`), which adds module classes, tied weights and buffers.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Literal

import msgspec

from dtype_engine.core import dtypes
from dtype_engine.core.draft_heads import NO_DRAFT, NOT_RUN, WORDS
from dtype_engine.core.errors import UserError
from dtype_engine.core.fused import fused_groups
from dtype_engine.core.kv_cache import KVCache
from dtype_engine.core.text import Name, printable
from dtype_engine.core.token_reads import UNKNOWN, rounded_bytes
from dtype_engine.core.units import human_bytes, human_count, percent, plural

MOST_PARTS = 200
"""Maximum number of dot-separated parts in a module's name. The tree's memory grows with the square of this number."""
MOST_MODULES = 500_000
"""Maximum number of modules in a tree, which take about 0.6 GB. A model of 671 billion parameters has 50,000 modules."""
Kind = Literal["parameter", "buffer", "non-persistent buffer"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the model as stored, before any cast."""

    name: Name
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = "parameter"
    aliases: tuple[Name, ...] = ()
    """The other names of a tied weight, which is listed and counted once under `name`."""
    packed_bytes: int | None = None
    """Bytes as stored, if only the file format tells them, as for GGUF's blocks."""
    uncastable_reason: str | None = None
    """Why no rule can cast the tensor, for example as part of a quantized weight. None if a rule can, or if only its dtype prevents
    it.
    """
    own_codes: bool = False
    """Whether the tensor holds codes, such as float8 or int8, whose scales are in the files, as in this program's own exports."""
    made_on_load: bool = False
    """Whether the model creates this tensor because the files do not hold it. Its bytes are then not counted."""
    stored_as: tuple[Name, ...] = ()
    """The tensor's names in the files, if they differ from `name`; several for a packed tensor. Patterns match them, too."""
    logical_numel: int | Literal["unknown"] | None = None
    """The number of parameters of a quantized weight; "unknown" if that can't be computed. None: each element is a parameter."""
    reference_dtype: str | None = None
    """The dtype of this tensor in the checkpoint with the reference's weights. None if they are the model's own."""
    numel: int = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)
    """Bytes as stored, scales included."""

    def __post_init__(self) -> None:
        # Trees have up to 90,000 tensors and every frame sums over them, so these are computed only once.
        numel = math.prod(self.shape)
        known = dtypes.BY_NAME.get(self.dtype)
        nbytes = self.packed_bytes if self.packed_bytes is not None else numel * known.bits // 8 if known else 0
        if self.own_codes:
            nbytes = dtypes.nbytes_in(self.shape, self.dtype)
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "nbytes", nbytes)

    @property
    def persistent(self) -> bool:
        """Whether a checkpoint holds this tensor: it is a parameter or a persistent buffer."""
        return self.kind != "non-persistent buffer"

    @property
    def parameters(self) -> int:
        """The number of parameters. It is 0 for a buffer, and if the number is unknown."""
        if self.kind != "parameter" or self.logical_numel == "unknown":
            return 0
        return self.numel if self.logical_numel is None else self.logical_numel

    @property
    def counted(self) -> bool:
        """Whether the model's total stored and planned bytes include this tensor."""
        return self.kind != "non-persistent buffer" and not self.made_on_load

    @property
    def castable(self) -> bool:
        """Whether a rule may change the dtype: torch computes in it, or it is a block format that can be dequantized."""
        return self.uncastable_reason is None and (self.dtype in dtypes.COMPUTE_DTYPES or self.packed_bytes is not None)

    def nbytes_in(self, dtype: str) -> int:
        """Return the tensor's bytes after a cast to `dtype`, or as stored if that is its stored dtype."""
        return self.nbytes if dtype == self.dtype else dtypes.nbytes_in(self.shape, dtype)

    @property
    def why_not_cast(self) -> str:
        """Why a rule does not cast the tensor, in words that follow its name: "is stored as int64, which is never cast"."""
        if self.castable and not self.persistent:
            return "is a buffer that no file holds, which only a rule with its own name casts"
        return self.uncastable_reason or f"is stored as {self.dtype}, which is never cast"

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the tensor: `name` first, then its aliases."""
        return (self.name, *self.aliases)


class Module(msgspec.Struct):
    """A module of the model, which is a node of the tree."""

    name: str
    class_name: str | None = None
    children: dict[str, Module] = msgspec.field(default_factory=dict)
    tensors: dict[str, TensorInfo] = msgspec.field(default_factory=dict)
    """The tensors that the module itself holds, by local name. The alias of a tied weight maps to its canonical tensor."""
    keep_in_fp32: str | None = None
    """A phrase for the user that cites the model's code if the code requires this module to be in float32, otherwise None."""
    first: int = 0
    """Index in `Tree.order` of the first tensor at or below this module."""
    end: int = 0
    """Index in `Tree.order` just after the last tensor at or below this module."""

    @property
    def label(self) -> str:
        return self.name.rpartition(".")[2]


class Totals(msgspec.Struct):
    """Elements and bytes per dtype of all tensors at or below a module. A tied weight counts once, under its canonical name."""

    elements: dict[str, int] = msgspec.field(default_factory=dict)
    nbytes: dict[str, int] = msgspec.field(default_factory=dict)
    parameters: int = 0
    """The number of parameters, including the values that packed weights represent."""
    buffers: int = 0
    """The number of elements in persistent buffers, which are not parameters."""
    unknown: int = 0
    """The number of packed weights that represent an unknown number of values."""
    tied: dict[str, int] = msgspec.field(default_factory=dict)
    """Bytes per dtype of tied weights below this module whose canonical name is elsewhere. All other totals leave them out."""

    def add(self, dtype: str, elements: int, nbytes: int) -> None:
        self.elements[dtype] = self.elements.get(dtype, 0) + elements
        self.nbytes[dtype] = self.nbytes.get(dtype, 0) + nbytes

    def add_tensor(self, tensor: TensorInfo, dtype: str) -> None:
        """Add one tensor. dtype: its planned dtype, or its stored dtype if it is not cast."""
        self.add(dtype, tensor.numel, tensor.nbytes_in(dtype))
        self.parameters += tensor.parameters
        self.buffers += tensor.numel if tensor.kind == "buffer" else 0
        self.unknown += tensor.logical_numel == "unknown"

    @classmethod
    def sum_of(cls, parts: Iterable[Totals]) -> Totals:
        """Return the sum of the totals of several modules."""
        whole = cls()
        for part in parts:
            for dtype, nbytes in part.nbytes.items():
                whole.add(dtype, part.elements[dtype], nbytes)
            for dtype, nbytes in part.tied.items():
                whole.tied[dtype] = whole.tied.get(dtype, 0) + nbytes
            whole.parameters += part.parameters
            whole.buffers += part.buffers
            whole.unknown += part.unknown
        return whole

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes.values())

    @property
    def parameters_text(self) -> str:
        """The number of parameters, such as `1.2 M`; a lower bound, `> 1.2 M`, if some are unknown; `-` if all are tied."""
        if self.unknown:
            return f"> {human_count(self.parameters)}" if self.parameters else "unknown"
        return "-" if self.tied and not self.nbytes else human_count(self.parameters)

    def mix(self) -> list[tuple[str, float]]:
        """Return pairs (dtype, fraction of the bytes), largest first. Tied weights count only if there are no other tensors."""
        held = self.nbytes or self.tied
        whole = sum(held.values())
        shares = [(dtype, size / whole if whole else 0.0) for dtype, size in held.items() if size or not whole]
        return sorted(shares, key=lambda share: (-share[1], share[0]))


class NodeTotals(Mapping[str, Totals]):
    """A mapping from each module's name to its totals, computed when they are looked up.

    A module's tensors are consecutive in `Tree.order`, so its totals are the difference of two entries of running sums.
    """

    def __init__(self, tree: Tree, planned: Mapping[str, str] | None) -> None:
        self._tree = tree
        self._planned = planned
        self._indices: dict[str, list[int]] = {}
        self._elements: dict[str, list[int]] = {}
        self._nbytes: dict[str, list[int]] = {}
        self._parameters, self._buffers, self._unknown = tree.counts
        for index, tensor in enumerate(tree.order):
            if not tensor.counted:
                continue
            dtype, size = self._under_plan(tensor)
            if dtype not in self._indices:
                self._indices[dtype], self._elements[dtype], self._nbytes[dtype] = [], [0], [0]
            self._indices[dtype].append(index)
            self._elements[dtype].append(self._elements[dtype][-1] + tensor.numel)
            self._nbytes[dtype].append(self._nbytes[dtype][-1] + size)

    def _under_plan(self, tensor: TensorInfo) -> tuple[str, int]:
        dtype = tensor.dtype if self._planned is None else self._planned.get(tensor.name, tensor.dtype)
        return dtype, tensor.nbytes_in(dtype)

    def __getitem__(self, module: str) -> Totals:
        return self.of((self._tree.modules[module],))

    def of(self, modules: Sequence[Module]) -> Totals:
        """Return the sum of the totals of several modules. They must be neighboring children of one module, in the tree's order."""
        start, stop = modules[0].first, modules[-1].end
        found = Totals()
        for dtype, indices in self._indices.items():
            first, end = bisect_left(indices, start), bisect_left(indices, stop)
            if end > first:
                elements, nbytes = self._elements[dtype], self._nbytes[dtype]
                found.add(dtype, elements[end] - elements[first], nbytes[end] - nbytes[first])
        found.parameters = self._parameters[stop] - self._parameters[start]
        found.buffers = self._buffers[stop] - self._buffers[start]
        found.unknown = self._unknown[stop] - self._unknown[start]
        for tensor in (tensor for module in modules for tensor in self._tree.tied_into(module.name)):
            if tensor.counted:
                dtype, size = self._under_plan(tensor)
                found.tied[dtype] = found.tied.get(dtype, 0) + size
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._tree.modules)

    def __len__(self) -> int:
        return len(self._tree.modules)


class Tree:
    """A model's modules and tensors by name, in the model's own order.

    `tensors` holds every distinct tensor once, by its canonical name; `canonical` also finds a tied weight by its aliases.
    `order` lists the tensors depth first, as the screen shows them. `by_number` sorts numbered modules by their numbers.
    """

    def __init__(
        self, tensors: Iterable[TensorInfo], classes: Mapping[str, str] | None = None, by_number: bool = False
    ) -> None:
        self.has_classes = classes is not None
        classes = classes or {}
        self.kv_cache = KVCache()
        """The KV cache that the model keeps while it generates text. None of its tensors is in `tensors`."""
        self.draft = NO_DRAFT
        """The layers that predict several tokens at once, and that no forward pass uses."""
        self.token_reads = UNKNOWN
        """Which of the weights are read to generate a token."""
        self.kept_in_fp32: dict[str, str] = {}
        """Single tensors that the model's code requires to be in float32, each with a phrase that cites this code."""
        self.root = Module("", classes.get(""))
        self.modules: dict[str, Module] = {"": self.root}
        self.tensors: dict[str, TensorInfo] = {}
        self._canonical: dict[str, str] = {}
        for name in classes:
            self._module(name, classes)
        for tensor in tensors:
            self.tensors[tensor.name] = tensor
            for name in tensor.names:
                parent, _, local = name.rpartition(".")
                self._module(parent, classes).tensors[sys.intern(local)] = tensor
            for name in tensor.aliases:
                self._canonical[name] = tensor.name
        self.renamed = tuple(tensor for tensor in self.tensors.values() if tensor.stored_as)
        """The tensors whose names in the files differ from their names in the model."""
        self._tied = [tensor for tensor in self.tensors.values() if tensor.aliases]
        self.order: list[TensorInfo] = []
        if by_number:
            for module in self.modules.values():
                if len(module.children) > 1 and all(is_number(label) and len(label) < 19 for label in module.children):
                    module.children = dict(sorted(module.children.items(), key=lambda child: int(child[0])))
        self._put_in_order()

    @property
    def caches(self) -> tuple[str, ...]:
        """The KV cache tensors to which a rule may give a format."""
        return tuple(tensor.name for tensor in self.kv_cache.tensors if tensor.castable)

    def __repr__(self) -> str:
        totals = self.totals()[""]
        mix = ", ".join(f"{dtypes.short_name(name)} {percent(share)} %" for name, share in totals.mix())
        return (
            f"Tree: {plural(len(self.modules) - 1, 'module')}, {plural(len(self.tensors), 'tensor')}, "
            f"{human_count(totals.parameters)} parameters, {human_bytes(totals.total_bytes)} stored ({mix})"
        )

    def _put_in_order(self) -> None:
        stack: list[tuple[Module, bool]] = [(self.root, False)]
        while stack:
            node, done = stack.pop()
            if done:
                node.end = len(self.order)
                continue
            node.first = len(self.order)
            if self._tied:
                prefix = f"{node.name}." if node.name else ""
                self.order += [tensor for local, tensor in node.tensors.items() if tensor.name == prefix + local]
            else:
                self.order += node.tensors.values()
            if node.children:
                stack.append((node, True))
                stack += [(child, False) for child in reversed(node.children.values())]
            else:
                node.end = len(self.order)

    def _module(self, name: str, classes: Mapping[str, str]) -> Module:
        known = self.modules.get(name)
        if known is not None:
            return known
        if name.count(".") >= MOST_PARTS:
            raise UserError(f"the name {printable(name)} has over {MOST_PARTS} parts, which no module has")
        above, _, label = name.rpartition(".")
        parent = self._module(above, classes)
        if len(self.modules) >= MOST_MODULES:
            raise UserError(f"the names of the tensors have over {MOST_MODULES:,} modules, which no model has")
        made = self.modules[name] = parent.children[sys.intern(label)] = Module(name, classes.get(name))
        return made

    def canonical(self, name: str) -> TensorInfo | None:
        """Return the tensor with this name or alias, or None if no tensor has it."""
        return self.tensors.get(self._canonical.get(name, name))

    def below(self, module: str) -> Iterator[TensorInfo]:
        """Yield each tensor at or below a module once: first those in `order`, then the tied weights that `tied_into` returns."""
        node = self.modules[module]
        yield from self.order[node.first : node.end]
        yield from self.tied_into(module)

    def tied_into(self, module: str) -> list[TensorInfo]:
        """Return the tied weights that have an alias, but not their canonical name, below a module."""
        inside = f"{module}." if module else ""
        return [
            tensor
            for tensor in self._tied
            if not tensor.name.startswith(inside) and any(name.startswith(inside) for name in tensor.aliases)
        ]

    def walk(self, module: str = "") -> Iterator[Module]:
        """Yield a module and all modules below it, depth first, as the screen shows them."""
        stack = [self.modules[module]]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    @cached_property
    def fused_groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups of weights that runtimes fuse into one matrix, such as those of q, k and v of one layer."""
        return fused_groups(self.tensors)

    @cached_property
    def names(self) -> tuple[list[str], list[str]]:
        """The names of all modules and distinct tensors, depth first, and the same names in lower case."""
        names: list[str] = []
        for node in self.walk():
            prefix = f"{node.name}." if node.name else ""
            if node.name:
                names.append(node.name)
            names += [tensor.name for local, tensor in node.tensors.items() if tensor.name == prefix + local]
        return names, [name if name.islower() else name.lower() for name in names]

    @cached_property
    def counts(self) -> tuple[list[int], list[int], list[int]]:
        """Running sums over `order`: parameters, elements in buffers, and packed weights with an unknown number of parameters."""
        return (
            [0, *accumulate(tensor.parameters for tensor in self.order)],
            [0, *accumulate(tensor.numel if tensor.kind == "buffer" else 0 for tensor in self.order)],
            [0, *accumulate(tensor.logical_numel == "unknown" for tensor in self.order)],
        )

    @cached_property
    def never_cast(self) -> list[int]:
        """Running sum over `order`: entry i is how many of the first i tensors have an `uncastable_reason`."""
        return [0, *accumulate(tensor.uncastable_reason is not None for tensor in self.order)]

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of parameters and persistent buffers as stored; a tied weight counts once."""
        return sum(tensor.nbytes for tensor in self.tensors.values() if tensor.counted)

    @cached_property
    def read_shares(self) -> Mapping[str, tuple[int, int]]:
        """The expected share (read, of) of its bytes that a token reads, by the name of each tensor that is not read whole."""
        shares: dict[str, tuple[int, int]] = {}
        for part in self.token_reads.parts:
            node = self.modules.get(part.name)
            inside = self.order[node.first : node.end] if node is not None else [self.tensors.get(part.name)]
            shares |= {tensor.name: (part.read, part.of) for tensor in inside if tensor is not None}
        by_name = {part.name: (part.read, part.of) for part in self.token_reads.parts}
        for tensor in self._tied:
            above = ((name, *ancestors(name)) for name in tensor.names)
            nearest = (next((by_name[each] for each in names if each in by_name), (1, 1)) for names in above)
            shares[tensor.name] = max(nearest, key=lambda share: share[0] / share[1])
        return {name: share for name, share in shares.items() if share != (1, 1)}

    @cached_property
    def read_units(self) -> int:
        """How many units make a byte, so that the bytes which a token reads of each tensor are a whole number of units."""
        return math.lcm(*{of for _, of in self.read_shares.values()})

    def active_units(self, tensor: TensorInfo, nbytes: int) -> int:
        """Return how much of a tensor of `nbytes` bytes a token reads, as a number of `read_units`."""
        read, of = self.read_shares.get(tensor.name, (1, 1))
        return nbytes * read * (self.read_units // of)

    def active_bytes(self, planned: Mapping[str, str] | None = None) -> int | None:
        """Return the expected bytes of weights that are read to generate one token, or None if they are unknown. planned: dtypes by
        tensor name, if not the stored ones.
        """
        if self.token_reads.none_because is not None:
            return None
        changes: dict[tuple[int, int], int] = {}
        for name, dtype in (planned or {}).items():
            tensor = self.tensors[name]
            if dtype != tensor.dtype and tensor.counted:
                share = self.read_shares.get(name, (1, 1))
                changes[share] = changes.get(share, 0) + tensor.nbytes_in(dtype) - tensor.nbytes
        units = sum(nbytes * read * (self.read_units // of) for (read, of), nbytes in changes.items())
        return rounded_bytes(self._stored_units + units, self.read_units)

    @cached_property
    def _stored_units(self) -> int:
        """How much a token reads of the tensors as stored, as a number of `read_units`."""
        return sum(self.active_units(tensor, tensor.nbytes) for tensor in self.tensors.values() if tensor.counted)

    @cached_property
    def of_draft(self) -> Mapping[str, TensorInfo]:
        """The tensors of the draft head, by name."""
        nodes = [self.modules[name] for name in self.draft.modules if name in self.modules]
        return {tensor.name: tensor for node in nodes for tensor in self.order[node.first : node.end]}

    @cached_property
    def searched(self) -> list[str]:
        """The weights to which a search may give a dtype: those that are cast and that a forward pass may use."""
        return [
            name
            for name, tensor in self.tensors.items()
            if tensor.castable and tensor.counted and name not in self.of_draft
        ]

    def totals(self, planned: Mapping[str, str] | None = None) -> NodeTotals:
        """Return a mapping from every module's name to its totals. planned: dtypes by tensor name, if not the stored ones."""
        return NodeTotals(self, planned)


def draft_notice(tree: Tree) -> tuple[str, ...]:
    """Return a sentence for the user about a draft head, or () if there is none."""
    if not tree.of_draft:
        return ()
    size = human_bytes(sum(tensor.nbytes for tensor in tree.of_draft.values()))
    return (
        f"{WORDS} in {printable(tree.draft.modules[0])}, {size}: {NOT_RUN}, so no drift or score covers it; the setting acceptance "
        "does, where transformers can run it",
    )


def is_number(part: str) -> bool:
    """Return whether one part of a dotted name counts layers or experts, such as `3` in `model.layers.3.mlp`."""
    return part.isdecimal()


def numbered_parts(name: str) -> list[int]:
    """Return the positions of the numbers among the dot-separated parts of a name: [2] for `model.layers.3.mlp`."""
    return [index for index, part in enumerate(name.split(".")) if is_number(part)]


def ancestors(name: str) -> Iterator[str]:
    """Yield the names of the modules above a dotted name: "a.b", "a" and "" for "a.b.c".

    A name of more than `MOST_PARTS` parts yields only "", because its ancestors could fill the memory. No tree has such a name, but
    an engine on another machine may send one.
    """
    if name.count(".") > MOST_PARTS:
        yield ""
        return
    while name:
        name = name.rpartition(".")[0]
        yield name


def from_tensors(tensors: Iterable[TensorInfo]) -> Tree:
    """Return a tree without classes or ties. Numbered modules are sorted: files often list names alphabetically."""
    return Tree(tensors, by_number=True)
