"""The app in a real pseudo-terminal, with its engine behind a real `sshd` and a line that takes 150 ms each way."""

from __future__ import annotations

import time
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


def test_ssh_session_survives_a_cut_line(tmp_path: Path) -> None:
    with ssh_server.running(tmp_path, SECONDS) as environment:
        terminal = Terminal(f"ssh://{ssh_server.HOST}", environment=environment)
        try:
            terminal.wait_for("perplexity")
            terminal.wait_for(" ready")
            before = slow_line.settled(terminal, tmp_path)
            for keys in ("jjjk", "hl", "E", "/mlp", "\x1b", "\x1b", "c", "*norm*=f1", "\x1b"):
                terminal.press(keys)
                time.sleep(0.4)  # Esc and a key right after it are one key
                terminal.read()
            assert slow_line.carried(tmp_path) == before, "the cursor, folding, the filter or a preview made traffic"

            terminal.press("3")
            terminal.wait_for("casting|measuring")
            terminal.wait_for(" ready")
            after = slow_line.settled(terminal, tmp_path)
            assert after[1] - before[1] <= MOST_BYTES

            (tmp_path / "down-for-now").touch()
            terminal.press("2")
            terminal.wait_for("casting|measuring")
            time.sleep(0.5)
            (client,) = (child for child in psutil.Process(terminal.pid).children() if child.name() == "ssh")
            client.kill()
            terminal.wait_for("connection cut: trying again")
            (tmp_path / "down-for-now").unlink()
            terminal.wait_for("connected again")
            terminal.wait_for(r"\* +bf16|bf16")
            terminal.wait_for(" ready")
            terminal.wait_for(r"SQNR +\d+\.\d")
            terminal.press("q")
            assert terminal.exit_status() == 0
            assert terminal.is_restored()
        finally:
            terminal.close()
    assert not list((tmp_path / "state").rglob("*.socket")), "the engine there ended with the app"
