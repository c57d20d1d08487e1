"""Keys on a machine where other programs compute on every core: how soon they are answered, and whether any is lost."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .rows import Row
from .watched import keys, p99, with_long_text

RUNS = 3
_TYPED = "embed_tokens model.layers self_attn q_proj k_proj v_proj"


@contextmanager
def computing(count: int) -> Iterator[None]:
    """Run `count` processes that only compute, with the niceness of this process."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def crowded(folder: Path) -> list[Row]:
    """Measure keys while the app measures and other processes compute: two, or one for each core if there are more cores."""
    from tests.helpers.terminal import Terminal

    text = with_long_text(folder)
    others = max(2, os.cpu_count() or 2)
    times: list[float] = []
    lost = 0
    with computing(others):
        for _ in range(RUNS):
            opened = Terminal(str(folder), "--cast", "*.mlp=float32", "--text", str(text))
            opened.wait_for("measuring", 300)
            times += keys(opened, 60, until="measuring")[0]
            opened.press("/")
            for letter in _TYPED:
                opened.press(letter)
                opened.read(0.02)
            opened.press("!")  # whatever was typed before it is on the screen once this is
            opened.wait_for("!", 60)
            shown = next((line for line in opened.text.splitlines() if "!" in line), "")
            lost += 0 if f"{_TYPED}!" in shown else 1
            opened.close()
    return [
        Row(f"keys while measuring, {others} other processes computing, p50", 1000 * statistics.median(times), "ms"),
        Row(f"the same, p99 of {len(times)} keys in {RUNS} measurements", 1000 * p99(times), "ms", 100),
        Row(f"of {RUNS} lines typed meanwhile, those that lost a key", lost, "", 0),
    ]
