"""Each test runs an app of its own in the same process, and what it left is garbage afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _nothing_frozen() -> Iterator[None]:
    yield
    gc.unfreeze()
