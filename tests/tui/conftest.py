"""Each test runs an app of its own in the same process, and what it left is garbage afterwards. Frames are rendered when a test
looks at them, and a style sheet is parsed for the first app that has it.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace

from tests.helpers import parsed_styles, unseen_frames

from dtype_tui.process import gc_policy

unseen_frames.leave_out()
parsed_styles.share()
# An app exempts from collections all objects that there are when its engine is ready: here, those of the tests before it as well.
gc_policy.gc = SimpleNamespace(  # type: ignore[assignment]
    disable=gc.disable, enable=gc.enable, isenabled=gc.isenabled, collect=gc.collect, freeze=lambda: None
)
