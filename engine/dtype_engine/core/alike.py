"""Finds neighbouring modules that are alike, such as the layers of a transformer, so that they can be shown as one. Does not import
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dtype_engine.core.tree import Module, Tree, is_number


class AlikeModules:
    """Says which modules of a tree are alike: of one class, with the same tensors (local names, shapes, stored and planned dtypes)
    and the same children, in this order. Nothing is compared before `runs` is called.
    """

    def __init__(self, tree: Tree, planned: Mapping[str, str]) -> None:
        """planned: the dtype that the recipe gives each tensor, by tensor name."""
        self._tree = tree
        self._planned = planned
        self._has_ties = any(tensor.aliases for tensor in tree.tensors.values())

    def runs(self, modules: Sequence[Module]) -> Iterator[list[Module]]:
        """Yield the modules in runs of alike neighbours. Only modules with numbers as labels, such as layers, share a run."""
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
        order, planned = self._tree.order, self._planned
        mine, others = len(one.name), len(other.name)
        for a, b in zip(order[one.first : one.end], order[other.first : other.end], strict=True):
            if a.shape != b.shape or a.dtype != b.dtype or a.kind != b.kind or a.name[mine:] != b.name[others:]:
                return False
            if planned.get(a.name) != planned.get(b.name):
                return False
        # Without classes and ties, the names of the tensors imply which modules there are.
        return not (self._tree.has_classes or self._has_ties) or self._have_same_modules(one, other)

    def _have_same_modules(self, one: Module, other: Module) -> bool:
        """Return whether two modules and those below them have the same classes, children and tied tensors."""
        stack = [(one, other)]
        while stack:
            a, b = stack.pop()
            if a.class_name != b.class_name or (self._has_ties and _ties(a) != _ties(b)):
                return False
            if a.children or b.children:
                if list(a.children) != list(b.children):
                    return False
                stack += zip(a.children.values(), b.children.values(), strict=True)
        return True


def _ties(module: Module) -> list[tuple[str, str]]:
    """Return the local names of a module's tied tensors, each with the tensor that it leads to. Two ties are alike if they lead to
    one tensor.
    """
    return [
        (local, tensor.name)
        for local, tensor in module.tensors.items()
        if tensor.aliases and tensor.name != f"{module.name}.{local}"
    ]
