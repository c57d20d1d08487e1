"""No test touches the state folder of whoever runs it: sessions go to a folder of the test run's own."""

from __future__ import annotations

import os
import tempfile

os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="dtype-tui-state-")
