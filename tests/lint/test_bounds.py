"""Which versions of dependencies no test runs with is found, and written down."""

from __future__ import annotations

from packaging.requirements import Requirement
from tests.helpers.paths import ROOT
from tests.lint.bounds import held_back, pins, requirements_with_tests, untested_bounds, untested_extras, untested_pins


def test_lower_bound_of_a_dependency_that_is_not_installed_exactly_is_found() -> None:
    installed = {"a": "2.0.0", "b": "1.10", "c": "3", "d": "1"}
    requirements = [Requirement(text) for text in ("a>=2,<3", "b>=1.9", "c[more]>=3.0  ", "d")]
    assert list(untested_bounds(requirements, installed)) == [
        "b>=1.9 is what pyproject.toml says, and 1.10 is installed",
        "d has no lower bound; 1 is installed",
    ]


def test_release_that_a_bound_excludes_is_named() -> None:
    outdated = [
        {"name": "b-c", "version": "1.9", "latest_version": "2.1"},
        {"name": "other", "version": "1", "latest_version": "2"},
    ]
    assert list(held_back([Requirement("a>=1"), Requirement("b_c>=1,<2")], outdated)) == [
        "b_c 2.1 is not tested: b_c<2,>=1 and other libraries allow 1.9"
    ]


def test_exact_version_outside_the_allowed_ones_is_found() -> None:
    requirements = [Requirement(text) for text in ("a>=2,<3", "b_c>=1", "d")]
    assert list(untested_pins(requirements, {"a": "3.0", "b-c": "1.0"})) == [
        "a<3,>=2 is what pyproject.toml says, and constraints.txt has 3.0",
        "d has no exact version in constraints.txt",
    ]


def test_constraints_meet_each_requirement_of_the_tests() -> None:
    assert not list(untested_pins(requirements_with_tests(), pins(ROOT / "constraints.txt")))


def test_readme_lists_each_library_that_no_test_run_installs() -> None:
    libraries = [name for names in untested_extras().values() for name in names]
    section = (ROOT / "tests" / "README.md").read_text().partition("## Versions")[2].partition("\n## ")[0]
    for name in libraries:
        assert f"`{name}`" in section, f"tests/README.md does not say that no test runs with {name}"
