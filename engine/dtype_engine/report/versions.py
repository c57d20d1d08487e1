"""What a measurement was made with."""

from __future__ import annotations

import platform
from importlib import metadata

from .. import __version__


def versions() -> dict[str, str]:
    """Versions of the program, of the libraries that do the arithmetic, of Python and of the system. Imports none of them."""
    found = {"dtype_engine": __version__}
    for name in ("torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
