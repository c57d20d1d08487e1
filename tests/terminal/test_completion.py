"""Completion of both programs' options, in the shells themselves."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from tests.helpers.terminal import PROGRAM

BIN = Path(PROGRAM).parent
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "TERM": "dumb"}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("dtype-engine", "dr"), "drift"),
        (("dtype-engine", "drift", "--sugg"), "--suggest"),
        (("dtype-engine", "recipe", "conv"), "convert"),
        (("dtype-tui", "--resu"), "--resume"),
        (("dtype-tui", "mod"), "model.safetensors"),
        (("dtype-engine", "inspect", "mod"), "model.safetensors"),
    ],
)
def test_bash_completes_options_and_files(words: tuple[str, ...], offered: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    name = words[0].replace("-", "_")
    script = f"""
        eval "$(_{name.upper()}_COMPLETE=bash_source {words[0]})"
        COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}
        _{name}_completion {words[0]}
        compopt() {{ :; }}
        if [ ${{#COMPREPLY[@]}} = 0 ]; then compgen -f -- {words[-1]}; else printf '%s\\n' "${{COMPREPLY[@]}}"; fi
    """
    bash = ["bash", "--norc", "-c", script]
    done = subprocess.run(bash, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert offered in done.stdout.split(), done.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh here")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("dtype-engine dr", "dtype-engine drift "),
        ("dtype-tui --resu", "dtype-tui --resume "),
        ("dtype-tui mod", "dtype-tui model.safetensors"),
    ],
)
def test_zsh_completes_commands_options_and_files(typed: str, completed: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    shell, terminal = pty.openpty()
    zsh = subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=terminal, stdout=terminal, stderr=terminal, cwd=tmp_path, env=ENVIRONMENT,
        start_new_session=True,
    )  # fmt: skip
    try:
        setup = "PS1='> '; autoload -Uz compinit; compinit -u -D"
        for program in ("dtype-tui", "dtype-engine"):
            setup += f'; eval "$(_{program.replace("-", "_").upper()}_COMPLETE=zsh_source {program})"'
        os.write(shell, f"{setup}; echo rea''dy\n".encode())
        seen = ""
        for send, awaited in ((f"{typed}\t", "ready"), ("", completed)):
            end = time.monotonic() + 60
            while awaited not in seen:
                assert time.monotonic() < end, seen
                if select.select([shell], [], [], 0.1)[0]:
                    seen += os.read(shell, 4096).decode(errors="replace")
            os.write(shell, send.encode())
    finally:
        zsh.kill()
        zsh.wait()
        os.close(shell)
        os.close(terminal)
