"""Chooses the modules that represent the depth of a model in a plot of drift over depth."""

from __future__ import annotations

from dtype_engine.core.text import printable
from dtype_engine.core.tree import Module, Tree, is_number, numbered_parts

_LONGEST_LABEL = 16


def depth_modules(tree: Tree) -> list[str]:
    """Return the names of the modules that represent the model's depth in a plot, in the tree's order.

    These are the layers of the outermost stacks, and the topmost modules outside stacks that hold weights. A stack is a module
    whose children are numbered, as in a ModuleList. A model without a stack is represented by the children of its root.
    """
    has_stack: dict[str, bool] = {}
    for module in reversed(tree.modules.values()):  # children come after their parents
        has_stack[module.name] = _is_stack(module) or any(has_stack[child.name] for child in module.children.values())
    found: list[str] = []
    waiting = [tree.root]
    while waiting:
        module = waiting.pop()
        if module is tree.root and not _is_stack(module):
            waiting.extend(reversed(module.children.values()))
        elif _is_stack(module):
            found += [child.name for child in module.children.values() if _has_weights(tree, child)]
        elif has_stack[module.name]:
            waiting.extend(reversed(module.children.values()))
        elif _has_weights(tree, module):
            found.append(module.name)
    return found


def _is_stack(module: Module) -> bool:
    return len(module.children) > 1 and all(map(is_number, module.children))


def _has_weights(tree: Tree, module: Module) -> bool:
    return any(tensor.persistent for tensor in (*module.tensors.values(), *tree.below(module.name)))


def depth_label(name: str) -> str:
    """Return the numbered part of a module's name, such as `layers.3`, or its last part if none is numbered."""
    shown = printable(name, 200)
    parts = shown.split(".")
    counted = next((index for index in numbered_parts(shown) if index), None)
    label = f"{parts[counted - 1]}.{parts[counted]}" if counted else parts[-1]
    return label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…"
