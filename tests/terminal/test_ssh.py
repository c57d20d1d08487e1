"""The app in a real pseudo-terminal, with its engine behind a real `sshd` and a line that takes 150 ms each way."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from tests.helpers import slow_line, ssh_server
from tests.helpers.terminal import Terminal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ssh_server.IS_THERE, reason="there is no sshd here (Debian: openssh-server)"),
]
SECONDS = 0.15
MOST_BYTES = 30_000
"""Of all that a measurement tells, ssh's own share included."""


def test_ssh_session_survives_a_lost_connection(tmp_path: Path) -> None:
    with (
        ssh_server.running(tmp_path, SECONDS) as environment,
        Terminal(f"ssh://{ssh_server.HOST}", environment=environment) as terminal,
    ):
        before = slow_line.look_around(terminal, tmp_path)
        terminal.press("3")
        terminal.wait_for("casting|measuring")
        terminal.wait_for(" ready")
        after = slow_line.settled(terminal, tmp_path)
        assert after[1] - before[1] <= MOST_BYTES

        def cut() -> None:
            (client,) = (child for child in psutil.Process(terminal.pid).children() if child.name() == "ssh")
            client.kill()

        slow_line.measure_over_a_cut(terminal, tmp_path, cut)
        terminal.leave()
    assert not list((tmp_path / "state").rglob("*.socket")), "the engine there ended with the app"
