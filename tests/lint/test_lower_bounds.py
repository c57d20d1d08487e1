"""Lower bounds that another dependency raises are found."""

from __future__ import annotations

from tests.lint.lower_bounds import untested_bounds


def test_lower_bound_of_a_dependency_that_is_not_installed_exactly_is_found() -> None:
    installed = {"a": "2.0.0", "b": "1.10", "c": "3", "d": "1"}
    found = list(untested_bounds(["a>=2,<3", "b>=1.9", "c[more]>=3.0  ", "d"], installed))
    assert found == [
        "b>=1.9 is what pyproject.toml says, and 1.10 is installed",
        "d has no lower bound; 1 is installed",
    ]
