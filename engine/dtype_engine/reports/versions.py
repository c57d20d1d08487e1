"""Lists the versions of the software on which the metrics of a measurement may depend."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from dtype_engine.core.version import __version__


def versions() -> dict[str, str]:
    """Return the versions of the program, of the libraries that do the arithmetic, of Python and of the system, by name.

    A library that is already imported, as after every measurement, tells its own version: torch's version includes the build
    (`2.13.0+cpu`), and two builds may differ in the last digits of a metric.
    """
    named = {"dtype_engine": __version__}
    for name in ("torch", "transformers"):
        if version := getattr(sys.modules.get(name), "__version__", None) or installed(name):
            named[name] = str(version)
    return named | {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}


def installed(name: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
