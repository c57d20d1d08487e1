"""`make demo` says what it does before it does it, and shows the errors of an installer only if no other takes over."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
UV_FAILS = 'echo "error: Failed to fetch" >&2\nexit 2'


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def demo(folder: Path, uv: str = "", pip: str = "") -> subprocess.CompletedProcess[str]:
    """Run `make demo` with programs in `folder` that do what these scripts say. The environment is made by a python of its own."""
    python = f'case "$*" in *"-e ."*) {pip or ":"};; esac'
    program(folder / "venv" / "made" / "python", python)
    program(folder / "venv" / "made" / "uv", uv)
    program(folder / "venv" / "made" / "dtype-tui", "echo the app")
    program(folder / "python", f'case "$*" in *venv*) mv {folder}/venv/made {folder}/venv/bin;; esac')
    arguments = [
        "env",
        "-u",
        "MAKEFLAGS",
        "-u",
        "MAKELEVEL",
        "make",
        "demo",
        f"PYTHON={folder}/python",
        f"VENV={folder}/venv",
    ]
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_make_demo_says_what_it_does(tmp_path: Path) -> None:
    made = demo(tmp_path)
    assert made.stdout.splitlines() == [
        f"Making a virtual environment in {tmp_path}/venv",
        f"Installing dtype-tui and torch into {tmp_path}/venv; this takes some minutes",
        "the app",
    ]
    assert made.stderr == ""


def test_make_demo_says_that_pip_takes_over_from_uv(tmp_path: Path) -> None:
    made = demo(tmp_path, uv=UV_FAILS)
    assert made.stdout.splitlines()[-2:] == ["uv can't install here, so pip does; this takes twice as long", "the app"]
    assert made.stderr == ""


def test_make_demo_shows_why_pip_failed(tmp_path: Path) -> None:
    made = demo(tmp_path, uv=UV_FAILS, pip='{ echo "ERROR: no network" >&2; exit 1; }')
    assert made.returncode != 0
    assert "ERROR: no network" in made.stderr
    assert "Failed to fetch" not in made.stderr
