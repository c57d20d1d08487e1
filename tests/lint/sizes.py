"""Finds functions, signatures and classes that are too large to be read at once.

A function has at most 60 lines, a signature at most 8 parameters (`self` not counted), and a class at most 20 fields: annotated
attributes, and what `__init__` assigns to `self`. Functions that declare a command's options for click may have more lines and
parameters, and the record of a drift more fields.

The product's folders are the arguments: `python -m tests.lint.sizes engine/dtype_engine tui/dtype_tui`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

LINES, PARAMETERS, FIELDS = 60, 8, 20
RECORDS = frozenset({"OutputDrift"})
"""Classes that may have any number of fields."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def too_large(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, sentence) for each function, signature and class of a file's `source` that is too large."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function) and not _declares_options(node):
            if (lines := _lines(node)) > LINES:
                yield node.lineno, f"{node.name} has {lines} lines, more than {LINES}"
            if (count := _parameters(node)) > PARAMETERS:
                yield node.lineno, f"{node.name} has {count} parameters, more than {PARAMETERS}"
        elif isinstance(node, ast.ClassDef) and node.name not in RECORDS and (fields := len(_fields(node))) > FIELDS:
            yield node.lineno, f"{node.name} has {fields} fields, more than {FIELDS}"


def _declares_options(function: Function) -> bool:
    """Return whether a function is a command of click, such as `@click.command` or `@recipe.command(name="new")`."""
    calls = [each.func if isinstance(each, ast.Call) else each for each in function.decorator_list]
    return any(isinstance(each, ast.Attribute) and each.attr in ("command", "group") for each in calls)


def _lines(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _parameters(function: Function) -> int:
    given = function.args
    named = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    is_method = named[:1] in (["self"], ["cls"])
    return len(named) - is_method + (given.vararg is not None) + (given.kwarg is not None)


def _fields(made: ast.ClassDef) -> set[str]:
    fields = {
        each.target.id for each in made.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for method in made.body:
        if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "__post_init__"):
            fields |= {
                each.attr
                for each in ast.walk(method)
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
                if isinstance(each.value, ast.Name) and each.value.id == "self"
            }
    return fields


def main(folders: Sequence[str]) -> int:
    """Print what is too large in the Python files of some folders, one line each. Returns the exit status: 1 if there is any."""
    found = [
        f"{path}:{line}: {sentence}"
        for folder in folders
        for path in sorted(Path(folder).rglob("*.py"))
        for line, sentence in too_large(path.read_text(encoding="utf-8"))
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
