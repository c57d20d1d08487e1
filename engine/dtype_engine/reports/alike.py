"""Finds neighboring modules that are alike, such as the layers of a transformer, so that they can be shown as one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dtype_engine.core.tree import Module, TensorInfo, Tree, ancestors, is_number


class AlikeModules:
    """Finds modules that are alike. Such modules have the same class, the same children and the same tensors, in the same order if
    the model is loaded, and the recipe gives their KV caches the same formats. Tensors are the same if their local names, shapes,
    kinds, stored and planned dtypes are equal.
    """

    def __init__(self, tree: Tree, planned: Mapping[str, str], caches: Mapping[str, str] | None = None) -> None:
        """planned, caches: the dtypes of tensors and the formats of KV caches under the recipe, by name."""
        self._caches: dict[str, list[tuple[str, str]]] = {}
        for name, form in (caches or {}).items():
            for above in ancestors(name):
                self._caches.setdefault(above, []).append((name[len(above) :], form))
        self._tree = tree
        self._planned = planned
        self._has_ties = any(tensor.aliases for tensor in tree.tensors.values())

    def runs(self, modules: Sequence[Module]) -> Iterator[list[Module]]:
        """Yield runs of neighboring children of a module that are alike. Only children whose labels are numbers can share a run."""
        run: list[Module] = []
        for module in modules:
            if run and not self._are_alike(run[-1], module):
                yield run
                run = []
            run.append(module)
        if run:
            yield run

    def _are_alike(self, one: Module, other: Module) -> bool:
        if not (is_number(one.label) and is_number(other.label)) or one.end - one.first != other.end - other.first:
            return False
        planned = self._planned
        mine, others = len(one.name), len(other.name)
        if self._caches.get(one.name) != self._caches.get(other.name):
            return False
        for a, b in zip(self._tensors(one), self._tensors(other), strict=True):
            if a.shape != b.shape or a.dtype != b.dtype or a.kind != b.kind or a.name[mine:] != b.name[others:]:
                return False
            if planned.get(a.name) != planned.get(b.name):
                return False
        # In a tree without classes and tied tensors, equal tensor names imply equal modules below.
        return not (self._tree.has_classes or self._has_ties) or self._have_same_modules(one, other)

    def _tensors(self, module: Module) -> Sequence[TensorInfo]:
        """Return the tensors below a module in the model's order or, if only the files are known, by name. Their order in the files
        differs for a layer that is in two files.
        """
        tensors = self._tree.order[module.first : module.end]
        return tensors if self._tree.has_classes else sorted(tensors, key=lambda tensor: tensor.name)

    def _have_same_modules(self, one: Module, other: Module) -> bool:
        stack = [(one, other)]
        while stack:
            a, b = stack.pop()
            if a.class_name != b.class_name or (self._has_ties and _ties(a) != _ties(b)):
                return False
            if a.children or b.children:
                if (
                    list(a.children) != list(b.children)
                    if self._tree.has_classes
                    else set(a.children) != set(b.children)
                ):
                    return False
                stack += [(child, b.children[label]) for label, child in a.children.items()]
        return True


def _ties(module: Module) -> list[tuple[str, str]]:
    """Return (local name, canonical name) for each of a module's tensors that is tied to a tensor elsewhere."""
    return [
        (local, tensor.name)
        for local, tensor in module.tensors.items()
        if tensor.aliases and tensor.name != f"{module.name}.{local}"
    ]
