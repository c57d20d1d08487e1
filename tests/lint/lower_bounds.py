"""Checks that the running Python has each direct dependency in the lowest version that pyproject.toml allows.

A bound that another dependency raises is one that no test has run with.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version
from tests.helpers.paths import ROOT


def untested_bounds(requirements: list[str], installed: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each requirement whose lower bound is not the installed version. installed: versions by name."""
    for text in requirements:
        requirement = Requirement(text)
        lowest = [each.version for each in requirement.specifier if each.operator == ">="]
        found = installed[requirement.name]
        if not lowest:
            yield f"{requirement.name} has no lower bound; {found} is installed"
        elif Version(lowest[0]) != Version(found):
            yield f"{requirement.name}>={lowest[0]} is what pyproject.toml says, and {found} is installed"


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = [Requirement(text).name for text in requirements]
    found = list(untested_bounds(requirements, {name: metadata.version(name) for name in names}))
    for sentence in found:
        print(f"{sentence}: raise the bound, because no test runs with it", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
