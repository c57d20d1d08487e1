"""Every long job has a progress bar, in a real pseudo-terminal. Each job is started by its keys."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import pytest
from tests.helpers.paths import DEMO
from tests.helpers.terminal import Terminal

_BAR = re.compile(r"^ ● (?P<job>\S.*?) +(?P<percent>\d+) % (?P<bar>[█▏▎▍▌▋▊▉]*) ", re.MULTILINE)
_READY = r"(?m)^ ● ready"
_JOBS = (
    ("d", "running each module as cast by itself"),
    ("g\r", "writing the reference's texts"),
    ("t", "timing"),
    ("s\r", "scan"),
)
"""The keys that start a job, and the name beside its bar."""


_SLOW = """
import time
from transformers import LlamaForCausalLM

class SlowLlama(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        time.sleep(0.1)
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small Llama whose passes wait: each job takes long enough to be drawn on a busy machine, and hardly any processor time."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=True, max_position_embeddings=512,
    )  # fmt: skip
    folder = tmp_path / "llama"
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"architectures": ["SlowLlama"], "auto_map": {"AutoModelForCausalLM": "slow.SlowLlama"}}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "slow.py").write_text(_SLOW)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


def bars_until(terminal: Terminal, pattern: str, seconds: float = 240) -> dict[str, list[int]]:
    """Return the percentages that the bar of each job showed, in order, until the screen matches `pattern`."""
    seen: dict[str, list[int]] = {}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        terminal.read()
        while terminal.read(0.005):  # half a frame may have one digit of the old number and one of the new
            pass
        found = _BAR.search(terminal.text)
        if found is not None:
            shares = seen.setdefault(found["job"].partition(":")[0], [])
            if not shares or shares[-1] != int(found["percent"]):
                shares.append(int(found["percent"]))
            filled = int(found["percent"]) >= 15
            assert bool(found["bar"]) >= filled, f"no bar for {found['percent']} %"
        elif re.search(pattern, terminal.text) and seen:
            return seen
    raise AssertionError(f"never saw {pattern!r} after a bar on this screen:\n{terminal.text}")


def test_each_job_has_a_progress_bar_that_never_goes_back(model: Path) -> None:
    """One app for all jobs, since each that starts measures the noise floor first. Its imports are done: `test_terminal.py` sees
    the bar while they are not. On a busy machine only one step of a short job may be drawn: that its steps rise is tested in
    `tests/engine/runtime/measure/test_progress.py`.
    """
    options = (
        "--cast",
        "model.layers.{0..1}.mlp=float16",
        "--device",
        "cpu",
        "--sequences",
        "4",
        "--trust-remote-code",
    )
    with Terminal(str(model), *options, forked=True) as terminal:
        _has_bars(bars_until(terminal, _READY), "measuring", "measuring the noise floor")
        for keys, job in _JOBS:
            terminal.wait_for(_READY)
            terminal.press(keys[0])
            if keys.endswith("\r"):
                terminal.wait_for("Enter scans|Enter generates")
                terminal.press("\r")
            _has_bars(bars_until(terminal, _READY), job)
            _close_what_opened(terminal)


def _has_bars(seen: dict[str, list[int]], *jobs: str) -> None:
    for job in jobs:
        assert job in seen, (job, seen)
        assert seen[job] == sorted(seen[job]), (job, seen)


def _close_what_opened(terminal: Terminal) -> None:
    until = time.perf_counter() + 60
    while "Esc closes" not in terminal.text and time.perf_counter() < until and "╭─ Drift" not in terminal.text:
        terminal.read()
    while "Esc closes" in terminal.text and time.perf_counter() < until:
        terminal.press("\x1b")
        for _ in range(10):
            terminal.read(0.1)
