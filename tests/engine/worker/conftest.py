"""A worker on the demo model, with all that it emits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.helpers.recorded_worker import RecordedWorker, recorded_worker


@pytest.fixture
def demo() -> Iterator[RecordedWorker]:
    with recorded_worker() as recorded:
        yield recorded
