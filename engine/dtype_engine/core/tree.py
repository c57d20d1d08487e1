"""Modules and tensors as a tree, without torch: what the screen shows and what patterns match against.

A tree comes from a checkpoint's headers at first (`from_tensors`, classes unknown) and from the live model
as soon as there is one (`runtime.model.live`), which adds module classes, tied weights and buffers.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.fused import fused_groups
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes, human_count, percent, plural

MOST_PARTS = 200
"""Parts between dots of a module's name: names that lie deeper would take memory with the square of that."""
Kind = Literal["parameter", "buffer", "non-persistent buffer"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the model as it is stored, before any cast.

    `aliases` are the further names of a tied weight: it is one tensor, listed and counted once, under `name`. `packed_bytes`
    has the bytes of a dtype that only its format knows (GGUF's blocks, whose values are float32). `uncastable_reason` says why
    a tensor is never cast where its dtype alone does not (it is part of a quantised weight). `quantized`: a storage-only dtype
    that comes with the scales of this program, as an exported checkpoint has it. `made_on_load`: the files do not hold it, the
    model makes it, so it has no bytes among those stored or planned. `stored_as`: its names in the files where they are others,
    several where it is packed of several tensors; patterns go by either. `meant`: the parameters that a part of a quantised
    weight stands for, where those are not its elements. `numel` elements, `nbytes` bytes as stored, the scales included.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = "parameter"
    aliases: tuple[str, ...] = ()
    packed_bytes: int | None = None
    uncastable_reason: str | None = None
    quantized: bool = False
    made_on_load: bool = False
    stored_as: tuple[str, ...] = ()
    meant: int | Literal["unknown"] | None = None
    numel: int = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Summed over and over, for trees of 90 000 tensors on the way to the next frame: worked out once.
        numel = math.prod(self.shape)
        known = dtypes.BY_NAME.get(self.dtype)
        nbytes = self.packed_bytes if self.packed_bytes is not None else numel * known.bits // 8 if known else 0
        if self.quantized:
            nbytes = dtypes.nbytes_in(self.shape, self.dtype)
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "nbytes", nbytes)

    @property
    def persistent(self) -> bool:
        """Whether a checkpoint holds it (parameters and persistent buffers)."""
        return self.kind != "non-persistent buffer"

    @property
    def parameters(self) -> int:
        """How many parameters it is, or stands for; 0 for a buffer, and where that is not known."""
        if self.kind != "parameter" or self.meant == "unknown":
            return 0
        return self.numel if self.meant is None else self.meant

    @property
    def counted(self) -> bool:
        """Whether its bytes are among those stored and planned."""
        return self.kind != "non-persistent buffer" and not self.made_on_load

    @property
    def castable(self) -> bool:
        """Whether a rule may change its dtype: only tensors in a dtype that is computed in are ever cast, and blocks that can be
        dequantized.
        """
        return self.uncastable_reason is None and (self.dtype in dtypes.COMPUTE_DTYPES or self.packed_bytes is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name it goes by, its own first."""
        return (self.name, *self.aliases)


@dataclass(slots=True)
class Module:
    """A node of the tree. `tensors` are its own, by local name; a tied alias shows the tensor it is tied to.

    `first` and `end`: the tensors at or below it, as indices into `Tree.order`.
    """

    name: str
    class_name: str | None = None
    children: dict[str, Module] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    keep_in_fp32: str | None = None
    first: int = 0
    end: int = 0

    @property
    def label(self) -> str:
        """The last part of the dotted name."""
        return self.name.rpartition(".")[2]


@dataclass(slots=True)
class Totals:
    """What lies below a node: elements and bytes per dtype, every tied weight once, where it has its own name.

    parameters: what is trained, the values that a packed weight stands for among them. buffers: elements of persistent
    buffers, which are none. unknown: packed weights that nothing tells the number of values of. tied: bytes per dtype of
    the weights held here by a further name only; the sums have them elsewhere, so those of children add up to their parent's.
    """

    elements: dict[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    parameters: int = 0
    buffers: int = 0
    unknown: int = 0
    tied: dict[str, int] = field(default_factory=dict)

    def add(self, dtype: str, elements: int, nbytes: int) -> None:
        self.elements[dtype] = self.elements.get(dtype, 0) + elements
        self.nbytes[dtype] = self.nbytes.get(dtype, 0) + nbytes

    @property
    def total_elements(self) -> int:
        return sum(self.elements.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes.values())

    def mix(self) -> list[tuple[str, float]]:
        """(dtype, its share of the bytes from 0 to 1), the largest share first; of those tied where there are no others."""
        held = self.nbytes or self.tied
        whole = sum(held.values())
        shares = [(dtype, size / whole if whole else 0.0) for dtype, size in held.items() if size or not whole]
        return sorted(shares, key=lambda share: (-share[1], share[0]))


class NodeTotals(Mapping[str, Totals]):
    """Totals of every module of a tree, by name, each worked out when it is asked for.

    Two running sums per dtype over `Tree.order`: a module's totals are differences of them.
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
        return dtype, tensor.nbytes if dtype == tensor.dtype else dtypes.nbytes_in(tensor.shape, dtype)

    def __getitem__(self, module: str) -> Totals:
        node = self._tree.modules[module]
        found = Totals()
        for dtype, indices in self._indices.items():
            first, end = bisect_left(indices, node.first), bisect_left(indices, node.end)
            if end > first:
                elements, nbytes = self._elements[dtype], self._nbytes[dtype]
                found.add(dtype, elements[end] - elements[first], nbytes[end] - nbytes[first])
        found.parameters = self._parameters[node.end] - self._parameters[node.first]
        found.buffers = self._buffers[node.end] - self._buffers[node.first]
        found.unknown = self._unknown[node.end] - self._unknown[node.first]
        for tensor in self._tree.tied_into(module):
            if tensor.counted:
                dtype, size = self._under_plan(tensor)
                found.tied[dtype] = found.tied.get(dtype, 0) + size
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._tree.modules)

    def __len__(self) -> int:
        return len(self._tree.modules)


class Tree:
    """A model's modules and tensors by name.

    `modules` and `tensors` are in the model's own order; with `by_number` numbered modules are in that of their numbers.
    `tensors` holds every distinct tensor once; `canonical` answers for every name that a tied weight goes by; `order` has the
    tensors as they are shown, depth first.
    """

    def __init__(
        self, tensors: Iterable[TensorInfo], classes: Mapping[str, str] | None = None, by_number: bool = False
    ) -> None:
        self.has_classes = classes is not None
        classes = classes or {}
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
        """Those whose files have other names for them."""
        self._tied = [tensor for tensor in self.tensors.values() if tensor.aliases]
        self.order: list[TensorInfo] = []
        if by_number:
            for module in self.modules.values():
                if len(module.children) > 1 and all(is_number(label) and len(label) < 19 for label in module.children):
                    module.children = dict(sorted(module.children.items(), key=lambda child: int(child[0])))
        self._put_in_order()

    def __repr__(self) -> str:
        totals = self.totals()[""]
        mix = ", ".join(f"{dtypes.short_name(name)} {percent(share)} %" for name, share in totals.mix())
        return (
            f"Tree: {plural(len(self.modules) - 1, 'module')}, {plural(len(self.tensors), 'tensor')}, "
            f"{human_count(totals.parameters)} parameters, {human_bytes(totals.total_bytes)} stored ({mix})"
        )

    def _put_in_order(self) -> None:
        """Note the distinct tensors as they are shown, depth first, and where in that order each module's are."""
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
        missing: list[str] = []
        while name not in self.modules:
            missing.append(name)
            name = name.rpartition(".")[0]
            if len(missing) > MOST_PARTS:
                raise UserError(f"the name {printable(missing[0])} has over {MOST_PARTS} parts, which no module has")
        made = self.modules[name]
        for name in reversed(missing):
            parent, made = made, Module(name, classes.get(name))
            parent.children[sys.intern(name.rpartition(".")[2])] = made
            self.modules[name] = made
        return made

    def canonical(self, name: str) -> TensorInfo | None:
        """The tensor that `name`, or one of a tied weight's other names, stands for."""
        return self.tensors.get(self._canonical.get(name, name))

    def below(self, module: str) -> Iterator[TensorInfo]:
        """Every distinct tensor in the subtree of a module, in order, those last that it holds by another name only."""
        node = self.modules[module]
        yield from self.order[node.first : node.end]
        yield from self.tied_into(module)

    def tied_into(self, module: str) -> list[TensorInfo]:
        """Tied weights that a module holds by a further name and not by their own."""
        inside = f"{module}." if module else ""
        return [
            tensor
            for tensor in self._tied
            if not tensor.name.startswith(inside) and any(name.startswith(inside) for name in tensor.aliases)
        ]

    def walk(self, module: str = "") -> Iterator[Module]:
        """A module and all below it, depth first, as they are shown."""
        stack = [self.modules[module]]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    @cached_property
    def fused_groups(self) -> tuple[tuple[str, ...], ...]:
        """The weights that runtimes multiply as one, by name."""
        return fused_groups(self.tensors)

    @cached_property
    def names(self) -> tuple[list[str], list[str]]:
        """The name of every module and distinct tensor as they are shown, depth first; and the same in lower case."""
        names: list[str] = []
        for node in self.walk():
            prefix = f"{node.name}." if node.name else ""
            if node.name:
                names.append(node.name)
            names += [tensor.name for local, tensor in node.tensors.items() if tensor.name == prefix + local]
        return names, [name if name.islower() else name.lower() for name in names]

    @cached_property
    def counts(self) -> tuple[list[int], list[int], list[int]]:
        """Running sums over `order`: of parameters, of elements of persistent buffers, of weights of unknown size."""
        parameters, buffers, unknown = [0], [0], [0]
        for tensor in self.order:
            parameters.append(parameters[-1] + tensor.parameters)
            buffers.append(buffers[-1] + (tensor.numel if tensor.kind == "buffer" else 0))
            unknown.append(unknown[-1] + (tensor.meant == "unknown"))
        return parameters, buffers, unknown

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of parameters and persistent buffers as stored, tied ones once."""
        return sum(tensor.nbytes for tensor in self.tensors.values() if tensor.counted)

    def totals(self, planned: Mapping[str, str] | None = None) -> NodeTotals:
        """Sums per module of parameters and persistent buffers, under planned dtypes by tensor name, else as stored."""
        return NodeTotals(self, planned)


def is_number(part: str) -> bool:
    """Whether a part of a name between dots counts layers, experts or the like: `3` in `model.layers.3.mlp`."""
    return part.isdecimal()


def numbered_parts(name: str) -> list[int]:
    """Indices of the parts of a dotted name that count layers, experts or the like: [2] of `model.layers.3.mlp`."""
    return [index for index, part in enumerate(name.split(".")) if is_number(part)]


def ancestors(name: str) -> Iterator[str]:
    """The modules above a dotted name, nearest first, the root ("") last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def from_tensors(tensors: Iterable[TensorInfo]) -> Tree:
    """A tree from tensor names alone: module classes and ties are not known yet.

    Files often list tensors by the alphabet; numbered modules are put in the order of their numbers.
    """
    return Tree(tensors, by_number=True)
