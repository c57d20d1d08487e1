"""Finds neighbouring modules that are alike, such as the layers of a transformer, so that they can be shown as one. Does not import
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from dtype_engine.core.tree import Module, Tree, is_number


class AlikeModules:
    """Says which modules of a tree are alike: of one class, with the same tensors (local names, shapes, stored and planned dtypes)
    and the same children, in this order.
    """

    def __init__(self, tree: Tree, planned: Mapping[str, str]) -> None:
        """planned: the dtype that the recipe gives each tensor, by tensor name."""
        self._form: dict[str, int] = {}
        """A number for each module's form, by the module's name. Modules with the same number are alike."""
        numbers: dict[tuple[object, ...], int] = {}
        for module in reversed(list(tree.walk())):
            prefix = f"{module.name}." if module.name else ""
            tensors = tuple(
                # Two ties are alike if they lead to one tensor, other tensors if their values have the same form.
                (local, tensor.shape, tensor.dtype, planned.get(tensor.name), tensor.kind)
                if tensor.name == prefix + local
                else (local, tensor.name)
                for local, tensor in module.tensors.items()
            )
            children = tuple((label, self._form[child.name]) for label, child in module.children.items())
            self._form[module.name] = numbers.setdefault((module.class_name, tensors, children), len(numbers))

    def runs(self, modules: Sequence[Module]) -> Iterator[list[Module]]:
        """Yield the modules in runs of alike neighbours. Only modules with numbers as labels, such as layers, share a run."""
        for _, run in groupby(
            modules, key=lambda module: self._form[module.name] if is_number(module.label) else module.name
        ):
            yield list(run)
