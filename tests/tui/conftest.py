"""Each test runs an app of its own in the same process, and what it left is garbage afterwards. Frames are rendered when a test
looks at them, and a style sheet is parsed for the first app that has it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from tests.helpers import draw_times, parsed_styles, quiet_screens, unseen_frames

draw_times.use()
unseen_frames.leave_out()
parsed_styles.share()
quiet_screens.leave_alone()


@pytest.fixture(autouse=True)
def _all_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's app has all colors, whatever terminal the tests run in."""
    monkeypatch.setenv("COLORTERM", "truecolor")


@pytest.fixture(autouse=True)
def _nothing_frozen() -> Iterator[None]:
    yield
    gc.unfreeze()
