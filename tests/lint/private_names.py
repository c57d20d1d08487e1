"""Finds names with a leading underscore that are used outside the file that defines them.

A name counts as used where it is imported, read as an attribute of anything, or asked for by `getattr`, `vars` or `__dict__`;
and as the file's own where it assigns it or defines a function or a class of that name. So `self._name` of a base class in another
file is found, and so is what other libraries keep private, but for the names in the files that exist to reach for them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGES = ("engine/dtype_engine", "tui/dtype_tui")
PUBLIC = frozenset({"_replace", "_asdict", "_fields", "_field_defaults", "_repr_html_"})
"""Documented in spite of their underscore: of named tuples, and what a notebook asks an object for."""
MEANT_FOR_IT = frozenset(
    {
        "engine/dtype_engine/runtime/libraries/hf_private.py",
        "engine/dtype_engine/runtime/libraries/torch_private.py",
        "tui/dtype_tui/process/textual_private.py",
    }
)
"""Files that may use private names of another library: one for each library."""


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of every private name in a file's `source` that the file does not define itself."""
    tree = ast.parse(source)
    own = set(_defined(tree)) | PUBLIC
    for line, name in _used(tree):
        if re.fullmatch(r"_[A-Za-z]\w*(?<!__)", name) and name not in own:
            yield line, name


def _used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module, names=names):
                for part in [*(module or "").split("."), *(alias.name for alias in names)]:
                    yield node.lineno, part
            case ast.Import(names=names):
                for alias in names:
                    for part in alias.name.split("."):
                        yield node.lineno, part
            case ast.Attribute(value=ast.Name(id="os"), attr="_exit"):
                pass  # documented
            case ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                yield node.lineno, name
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="vars")) | ast.Attribute(attr="__dict__"),
                slice=ast.Constant(value=str(name)),
            ):
                yield node.lineno, name


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def sources(root: Path, folders: Sequence[str] = PACKAGES) -> Iterator[tuple[str, str]]:
    """(path from `root`, text) of every Python file in these folders of it."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def main(root: Path = Path()) -> int:
    """Print what is found below `root`, one line each; the exit status: 1 where there is any."""
    status = 0
    for file, source in sources(root):
        for line, name in private_names(source) if file not in MEANT_FOR_IT else ():
            print(f"{file}:{line}: {name} is private to another file")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
