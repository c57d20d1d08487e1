"""Engines in a thread and in a process of their own: what they do is the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.helpers.recorded_worker import WAYS, RecordedEngine, Way

from dtype_engine import Options


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    """Where the engines of a test run."""
    which: Way = request.param
    return which


@pytest.fixture
def demo(way: Way) -> Iterator[RecordedEngine]:
    """An engine on the demo model, with all that it emits."""
    with RecordedEngine(way) as recorded:
        yield recorded


@pytest.fixture
def short(way: Way) -> Iterator[RecordedEngine]:
    """The same on a prompt of a few tokens."""
    with RecordedEngine(way, options=Options(prompts=("import os\nimport sys\n",))) as recorded:
        yield recorded
