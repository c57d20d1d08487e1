"""Finds what belongs to the room of the weights, `runtime/weights/`, in other rooms of `runtime/`: whatever else reads a weight
would be a second answer to the question what its values are.

- imports of `mmap`, calls of `os.pread` and `os.preadv`, and imports of the decoders in `runtime/formats/schemes/`;
- the attributes `quantized` and `encoded`, by which a reader would ask in which of two ways a weight is stored;
- the word "visit" in names, for a model over memory, in more than `MOST_FILES` files.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.lint.private_names import sources

RUNTIME = "engine/dtype_engine/runtime"
INSIDE = ("weights/", "formats/schemes/")
"""The rooms that may read weights: the sources, and the decoders themselves."""
MOST_FILES = 4
_DECODERS = "dtype_engine.runtime.formats.schemes"


def readers(source: str) -> Iterator[tuple[int, str]]:
    """(line, what it is) of everything in a file's `source` that only the room of the weights may have."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names) if any(alias.name == "mmap" for alias in names):
                yield node.lineno, "mmap"
            case ast.ImportFrom(module=module) if module == "mmap" or (module or "").startswith(_DECODERS):
                yield node.lineno, str(module)
            case ast.ImportFrom(module="dtype_engine.runtime.formats", names=names):
                if any(alias.name == "schemes" for alias in names):
                    yield node.lineno, _DECODERS
            case ast.Attribute(attr="pread" | "preadv" | "quantized" | "encoded"):
                yield node.lineno, f".{node.attr}"


def names_visits(source: str) -> bool:
    """Return whether a name in a file's `source` has the word "visit"."""
    for node in ast.walk(ast.parse(source)):
        name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
        if isinstance(name, str) and "visit" in name.lower():
            return True
    return False


def main(root: Path = Path()) -> int:
    """Print what is found below `root`, one line each; the exit status: 1 where there is any."""
    status, visiting = 0, list[str]()
    for name, source in sources(root, (RUNTIME,)):
        if names_visits(source):
            visiting.append(name)
        if not name.removeprefix(f"{RUNTIME}/").startswith(INSIDE):
            for line, found in readers(source):
                print(f"{name}:{line}: {found} belongs to runtime/weights/")
                status = 1
    if len(visiting) > MOST_FILES:
        print(f'{len(visiting)} files have "visit" in names, at most {MOST_FILES} may: {", ".join(visiting)}')
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
