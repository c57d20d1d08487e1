"""Finds mechanisms that this project does without, since they break unseen when Python or another library changes:

- the module `ctypes`;
- an assignment to an attribute of an imported module or class, which changes it for everybody. `core/replaced.py` makes one for a
  while, and the file `PATCHES` one for good;
- a class made by `type(name, bases, attributes)`, which no reader and no type checker can follow;
- the subscript `["_parameters"]`, which reaches a private name without naming it as an attribute.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.lint.private_names import sources

PATCH = "an assignment to an attribute of what is imported"
PATCHES = "tui/dtype_tui/process/textual_private.py"
_NO_PATCH = ("dtype_engine", "dtype_tui", "sys", "threading")
"""The project's own packages, and modules of which Python documents that attributes may be assigned, such as `sys.stdout`."""


def mechanisms(source: str) -> Iterator[tuple[int, str]]:
    """(line, what it is) of every mechanism in a file's `source`."""
    tree = ast.parse(source)
    imported = {name for library, name in _imports(tree) if library not in _NO_PATCH}
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom() if any(library == "ctypes" for library, _ in _imports(node)):
                yield node.lineno, "ctypes"
            case (
                ast.Attribute(value=holder, ctx=ast.Store() | ast.Del())
                | ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[holder, *_])
            ) if _first(holder) in imported:
                yield node.lineno, PATCH
            case ast.Call(func=ast.Name(id="type"), args=[_, _, _]):
                yield node.lineno, "a class made by type()"
            case ast.Subscript(slice=ast.Constant(value="_parameters")):
                yield node.lineno, 'a subscript ["_parameters"]'


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(top package, name in the file) of everything that is imported."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    top = alias.name.partition(".")[0]
                    yield top, alias.asname or top
            case ast.ImportFrom(module=module, names=names):
                for alias in names:
                    yield (module or "").partition(".")[0], alias.asname or alias.name


def _first(holder: ast.expr) -> str | None:
    """Return `a` for `a.b.c`, or None for an expression that does not begin with a name."""
    while isinstance(holder, ast.Attribute):
        holder = holder.value
    return holder.id if isinstance(holder, ast.Name) else None


def main(root: Path = Path()) -> int:
    """Print what is found below `root`, one line each; the exit status: 1 where there is any."""
    status = 0
    for file, source in sources(root):
        for line, found in mechanisms(source):
            if found != PATCH or file != PATCHES:
                print(f"{file}:{line}: {found}")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
