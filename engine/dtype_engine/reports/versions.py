"""What a measurement was made with."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from dtype_engine.core.version import __version__


def versions() -> dict[str, str]:
    """Versions of the program, of the libraries that do the arithmetic, of Python and of the system. Imports none of them.

    A library that has been imported, as for every measurement, says its own version: torch's names the build
    (`2.13.0+cpu`), and two builds may differ in the last digits of a figure. The installed package of the same build may
    say `2.13.0` alone; that is taken only when the library has not been imported.
    """
    named = {"dtype_engine": __version__}
    for name in ("torch", "transformers"):
        try:
            named[name] = str(getattr(sys.modules.get(name), "__version__", None) or metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return named | {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
