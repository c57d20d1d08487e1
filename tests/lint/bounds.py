"""Says which versions that pyproject.toml allows no test runs with.

`python -m tests.lint.bounds lowest`, which `make test-lowest` runs, checks that each direct dependency is installed in the lowest
version that is allowed. A bound that another dependency raises is one that no test has run with. `newest`, which
`make test-newest` runs, prints which direct dependencies have newer releases than are allowed.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tests.helpers.paths import ROOT

TESTED_EXTRAS = ("dev", "diffusers")
"""The extras that `make test-lowest` and `make test-newest` install."""


def project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def requirements_with_tests() -> list[Requirement]:
    """The requirements of the program and of `TESTED_EXTRAS`."""
    table = project()
    optional = [text for extra in TESTED_EXTRAS for text in table["optional-dependencies"][extra]]
    return [Requirement(text) for text in (*table["dependencies"], *optional)]


def untested_extras() -> dict[str, list[str]]:
    """The names of the libraries that no target of the Makefile installs, by the extra that needs them."""
    tested = {canonicalize_name(each.name) for each in requirements_with_tests()}
    named = {
        extra: [canonicalize_name(Requirement(text).name) for text in texts]
        for extra, texts in project()["optional-dependencies"].items()
    }
    untested = {extra: [name for name in names if name not in tested] for extra, names in named.items()}
    return {extra: names for extra, names in untested.items() if names}


def pins(constraints: Path) -> dict[str, str]:
    """The exact versions in a file of constraints, by canonical name."""
    lines = [line.partition("#")[0].strip() for line in constraints.read_text().splitlines()]
    return {canonicalize_name(name): version for line in lines if line for name, _, version in [line.partition("==")]}


def untested_pins(requirements: list[Requirement], pinned: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each requirement that the pinned versions do not meet: `make test` would run with what nobody may install."""
    for each in requirements:
        version = pinned.get(canonicalize_name(each.name))
        if version is None:
            yield f"{each.name} has no exact version in constraints.txt"
        elif not each.specifier.contains(version, prereleases=True):
            yield f"{each} is what pyproject.toml says, and constraints.txt has {version}"


def untested_bounds(requirements: list[Requirement], installed: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each requirement whose lower bound is not the installed version. installed: versions by name."""
    for each in requirements:
        lowest = [bound.version for bound in each.specifier if bound.operator == ">="]
        found = installed[each.name]
        if not lowest:
            yield f"{each.name} has no lower bound; {found} is installed"
        elif Version(lowest[0]) != Version(found):
            yield f"{each.name}>={lowest[0]} is what pyproject.toml says, and {found} is installed"


def held_back(requirements: list[Requirement], outdated: list[Mapping[str, str]]) -> Iterator[str]:
    """A sentence for each requirement of which there is a newer release than the installed one.

    outdated: the list that `uv pip list --outdated --format json` prints.
    """
    latest = {canonicalize_name(each["name"]): each for each in outdated}
    for requirement in requirements:
        if (found := latest.get(canonicalize_name(requirement.name))) is not None:
            newest, installed = found["latest_version"], found["version"]
            yield f"{requirement.name} {newest} is not tested: {requirement} and other libraries allow {installed}"


def main() -> int:
    requirements, what = requirements_with_tests(), sys.argv[1]
    if what == "newest":
        print(*held_back(requirements, json.load(sys.stdin)), sep="\n")
        return 0
    found = list(untested_bounds(requirements, {each.name: metadata.version(each.name) for each in requirements}))
    for sentence in found:
        print(f"{sentence}: raise the bound, because no test runs with it", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
