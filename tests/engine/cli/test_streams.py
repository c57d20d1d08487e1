"""Standard streams: what goes to them, and what becomes of a program that has not got them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.helpers import preloaded

PRINTING = """
import atexit, ctypes, os, subprocess, sys
import torch

def leak(place):
    print("LEAK of Python", place)
    print("LEAK past sys.stdout", place, file=sys.__stdout__)

leak("file")
ctypes.CDLL(None).puts(b"LEAK of C")
os.write(1, b"LEAK of a descriptor\\n")
subprocess.run(["echo", "LEAK of a process"])
atexit.register(leak, "end")

class Net(torch.nn.Linear):
    def __init__(self):
        leak("constructor")
        super().__init__(4, 4)
    def forward(self, x):
        leak("forward")
        return super().forward(x)

def example_inputs():
    leak("inputs")
    return (torch.ones(1, 4),)
"""
COMMANDS = {
    "inspect": ("inspect",),
    "drift": ("drift", "--cast", "*=bf16", "--causes"),
    "flow": ("flow", "--cast", "*=bf16"),
    "speed": ("speed", "--repeats", "3"),
    "scan": ("scan", "--dtypes", "bf16"),
    "presets": ("recipe", "presets"),
}


@pytest.fixture
def printing(tmp_path: Path) -> str:
    """A model whose code prints wherever it is run, in every way."""
    (tmp_path / "printing.py").write_text(PRINTING)
    return f"{tmp_path / 'printing.py'}:Net"


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_models_code_prints_is_no_answer(printing: str, command: str) -> None:
    said = preloaded.run(preloaded.COMMAND, *COMMANDS[command], printing)
    assert said.returncode == 0
    assert said.stdout.strip()
    assert "LEAK" not in said.stdout
    as_object = preloaded.run(preloaded.COMMAND, *COMMANDS[command], printing, "--json")
    assert isinstance(json.loads(as_object.stdout), dict)
    for done in (said, as_object):
        for way in ("of Python end", "past sys.stdout constructor", "of C", "of a descriptor", "of a process"):
            assert f"LEAK {way}" in done.stderr


def test_help_is_an_answer() -> None:
    done = preloaded.run(preloaded.COMMAND, "drift", "--help")
    assert done.stdout.startswith("Usage: dtype-engine drift")
    assert done.stderr == ""
