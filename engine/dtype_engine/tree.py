"""Modules and tensors as a tree, without torch: what the screen shows and what patterns match against.

A tree comes from a checkpoint's headers at first (`from_tensors`, classes unknown) and from the live model
as soon as there is one (`dtype_engine.model`), which adds module classes, tied weights and buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from . import dtypes

Kind = Literal["parameter", "buffer", "non-persistent buffer"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the model as it is stored, before any cast.

    `aliases` are the further names of a tied weight: it is one tensor, listed and counted once, under `name`. `scaled`: a
    storage-only dtype that comes with the scales of this program, as an exported checkpoint has it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = "parameter"
    aliases: tuple[str, ...] = ()
    scaled: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes as stored, the scales included."""
        if self.scaled:
            return dtypes.stored_bytes(self.shape, self.dtype)
        return self.numel * dtypes.BY_NAME[self.dtype].bits // 8 if self.dtype in dtypes.BY_NAME else 0

    @property
    def persistent(self) -> bool:
        """Whether a checkpoint holds it (parameters and persistent buffers)."""
        return self.kind != "non-persistent buffer"

    @property
    def castable(self) -> bool:
        """Whether a rule may change its dtype: only tensors in a dtype that is computed in are ever cast."""
        return self.dtype in dtypes.COMPUTED

    @property
    def names(self) -> tuple[str, ...]:
        """Every name it goes by, its own first."""
        return (self.name, *self.aliases)


@dataclass(slots=True)
class Module:
    """A node of the tree. `tensors` are its own, by local name; a tied alias shows the tensor it is tied to."""

    name: str
    class_name: str | None = None
    children: dict[str, Module] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    island: str | None = None

    @property
    def label(self) -> str:
        """The last part of the dotted name."""
        return self.name.rpartition(".")[2]


@dataclass(slots=True)
class Totals:
    """What lies below a node: elements and bytes per dtype, every tied weight once."""

    elements: dict[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)

    def add(self, dtype: str, elements: int, nbytes: int) -> None:
        self.elements[dtype] = self.elements.get(dtype, 0) + elements
        self.nbytes[dtype] = self.nbytes.get(dtype, 0) + nbytes

    def merge(self, other: Totals) -> None:
        for dtype, elements in other.elements.items():
            self.add(dtype, elements, other.nbytes[dtype])

    @property
    def total_elements(self) -> int:
        return sum(self.elements.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes.values())

    def mix(self) -> list[tuple[str, float]]:
        """(dtype, its share of the bytes from 0 to 1), the largest share first."""
        whole = self.total_bytes
        shares = [(dtype, size / whole if whole else 0.0) for dtype, size in self.nbytes.items() if size or not whole]
        return sorted(shares, key=lambda share: (-share[1], share[0]))


class Tree:
    """A model's modules and tensors by name.

    `modules` and `tensors` are in the model's own order. `tensors` holds every distinct tensor once;
    `canonical` answers for every name that a tied weight goes by.
    """

    def __init__(self, tensors: Iterable[TensorInfo], classes: Mapping[str, str] | None = None) -> None:
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
                self._canonical[name] = tensor.name
                parent, _, local = name.rpartition(".")
                self._module(parent, classes).tensors[local] = tensor

    def _module(self, name: str, classes: Mapping[str, str]) -> Module:
        found = self.modules.get(name)
        if found is not None:
            return found
        parent_name, _, label = name.rpartition(".")
        parent = self._module(parent_name, classes)
        made = Module(name, classes.get(name))
        parent.children[label] = made
        self.modules[name] = made
        return made

    def canonical(self, name: str) -> TensorInfo | None:
        """The tensor that `name`, or one of a tied weight's other names, stands for."""
        found = self._canonical.get(name)
        return self.tensors[found] if found is not None else None

    def below(self, module: str) -> Iterator[TensorInfo]:
        """Every distinct tensor in the subtree of a module, in order."""
        seen: set[str] = set()
        for node in self.walk(module):
            for tensor in node.tensors.values():
                if tensor.name not in seen:
                    seen.add(tensor.name)
                    yield tensor

    def walk(self, module: str = "") -> Iterator[Module]:
        """A module and all below it, depth first, as they are shown."""
        stack = [self.modules[module]]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    @property
    def stored_bytes(self) -> int:
        """Bytes of parameters and persistent buffers as stored, tied ones once."""
        return sum(tensor.nbytes for tensor in self.tensors.values() if tensor.persistent)

    def totals(self, planned: Mapping[str, str] | None = None) -> dict[str, Totals]:
        """Sums per module of parameters and persistent buffers, under planned dtypes by tensor name, else as stored."""
        result = {name: Totals() for name in self.modules}
        for tensor in self.tensors.values():
            if not tensor.persistent:
                continue
            dtype = planned.get(tensor.name, tensor.dtype) if planned is not None else tensor.dtype
            size = tensor.nbytes if dtype == tensor.dtype else dtypes.stored_bytes(tensor.shape, dtype)
            result[tensor.name.rpartition(".")[0]].add(dtype, tensor.numel, size)
        # A module follows its parent in `modules`, so backwards every subtree is complete before it is added up.
        for name in reversed(self.modules):
            if name:
                result[name.rpartition(".")[0]].merge(result[name])
        for tensor in self.tensors.values():
            if tensor.aliases and tensor.persistent:
                self._add_tied(tensor, planned, result)
        return result

    def _add_tied(self, tensor: TensorInfo, planned: Mapping[str, str] | None, result: dict[str, Totals]) -> None:
        """Count a tied weight in the modules that hold only its other names too."""
        dtype = planned.get(tensor.name, tensor.dtype) if planned is not None else tensor.dtype
        size = tensor.nbytes if dtype == tensor.dtype else dtypes.stored_bytes(tensor.shape, dtype)
        counted = set(ancestors(tensor.name))
        for alias in tensor.aliases:
            for module in ancestors(alias):
                if module not in counted:
                    counted.add(module)
                    result[module].add(dtype, tensor.numel, size)


def ancestors(name: str) -> Iterator[str]:
    """The modules above a dotted name, nearest first, the root ("") last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def from_tensors(tensors: Iterable[TensorInfo]) -> Tree:
    """A tree from tensor names alone: module classes and ties are not known yet.

    Files often list tensors by the alphabet; numbered modules are put in the order of their numbers.
    """
    tree = Tree(tensors)
    for module in tree.modules.values():
        if len(module.children) > 1 and all(label.isdigit() for label in module.children):
            module.children = dict(sorted(module.children.items(), key=lambda child: int(child[0])))
    return tree
