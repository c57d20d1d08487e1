"""The installed program in a real pseudo-terminal, from start to a clean end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.helpers import preloaded
from tests.helpers.panicking_tokenizer import with_panicking_tokenizer
from tests.helpers.paths import TINYNET
from tests.helpers.terminal import PROGRAM, QUICK, WITH_ENGINE, Opener

import dtype_engine as de


def test_app_in_a_terminal_casts_and_measures_and_restores_the_terminal_at_exit(opened: Opener) -> None:
    terminal = opened(forked=False)
    terminal.wait_for(r"(?m)^ ● .*import.* \d+ % [█▏▎▍▌▋▊▉]")
    terminal.wait_for("embed_tokens")
    terminal.wait_for(r"ready")
    terminal.wait_for(r"SQNR +exact")
    terminal.press("\x1b[200~\x1b[31m3\x1b[A\n3q\x1b[201~")  # no key of a paste is pressed
    terminal.press("c")
    terminal.wait_for(r"\*=bf16\s")
    terminal.wait_for(r"matches 5\d tensors · 707\.8 k parameters · 2\.70 MiB → 1\.35 MiB")
    terminal.press("\r")
    terminal.wait_for(r"planned +1\.35 MiB of 2\.70 MiB stored")
    terminal.wait_for(r"SQNR +4\d\.\d\d dB")
    terminal.wait_for(r"KL .*\d\.\d+e-4 .*± \de-\d nats")
    terminal.press("u")
    terminal.wait_for(r"SQNR +exact")
    terminal.leave()


def test_panic_of_a_library_writes_nothing_on_the_screen(opened: Opener, tmp_path: Path) -> None:
    """The tokenizers library writes its panics to the descriptor of standard error, on which the screen is drawn."""
    folder = with_panicking_tokenizer("a bad prepend", tmp_path / "model")
    terminal = opened(str(folder), "--in-process")
    terminal.wait_for(r"SQNR +exact")
    terminal.press("i")
    terminal.wait_for("tokenizer that is damaged")
    assert b"thread '" not in terminal.raw
    terminal.press("\x1b")
    terminal.leave()


def test_status_line_is_cleared_after_two_results_in_a_row(opened: Opener) -> None:
    """The main screen is repainted although a window over it is just opening."""
    terminal = opened(f"{TINYNET}:TinyNet", size=(80, 24))
    terminal.wait_for(r"SQNR +exact")
    terminal.press("2")
    terminal.wait_for(r"SQNR +exact → 5\d\.\d\d dB ▲")
    terminal.wait_for(r"ready")
    terminal.press("tf")
    terminal.wait_for("Forward passes over all inputs, timed")
    terminal.wait_for("Dtype flow")
    terminal.wait_for(r"ready", 20)
    terminal.press("\x1b")
    time.sleep(1)
    terminal.press("\x1b")
    time.sleep(1)
    terminal.leave()


def test_command_line_rules_can_be_undone(opened: Opener) -> None:
    terminal = opened("--cast", "*.mlp=bf16", "--cast", "model.layers.0=f16", *QUICK, size=(80, 24))
    terminal.wait_for(r"█ bf16")
    terminal.wait_for("ready")
    terminal.press("u")
    terminal.wait_for("f32")
    terminal.leave()


def test_rule_with_a_tensor_name_that_only_the_live_model_has_is_accepted(opened: Opener) -> None:
    terminal = opened("--cast", "lm_head=bf16", *QUICK)
    terminal.wait_for("ready")
    terminal.wait_for(r"1 lm_head +bf16 +1")


def test_model_of_a_python_file_is_opened_and_measured_in_the_app(opened: Opener) -> None:
    session = de.open(f"{TINYNET}:TinyNet")
    session.cast("*", "float16")
    output = session.drift().output
    terminal = opened(f"{TINYNET}:TinyNet", "--cast", "*=float16")
    terminal.wait_for(rf"max \|Δ\| +{re.escape(f'{output.max_abs:.3g}')}")
    terminal.press("\r")
    terminal.wait_for(rf"mean \|Δ\| +{re.escape(f'{output.mean_abs:.4e}')}")
    terminal.wait_for(rf"max \|Δ\| +{re.escape(f'{output.max_abs:.4e}')}")


@pytest.mark.parametrize(
    ("number", "state", "forked"),
    [
        (signal.SIGTERM, "ready", True),
        (signal.SIGHUP, "embed_tokens", False),
        (signal.SIGQUIT, "embed_tokens", True),
        (signal.SIGUSR1, "ready", True),
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_signals_end_the_app_cleanly(opened: Opener, number: signal.Signals, state: str, forked: bool) -> None:
    """The signal arrives after a model was opened, or while it is being opened."""
    terminal = opened(*QUICK, forked=forked)
    terminal.wait_for(state)
    os.kill(terminal.pid, number)
    assert terminal.exit_status() == 128 + number
    assert terminal.is_restored()


def test_app_can_be_quit_while_the_model_opens(opened: Opener) -> None:
    terminal = opened(forked=False)
    terminal.wait_for("embed_tokens")
    terminal.leave()


def test_app_shows_the_needed_size_in_a_too_small_terminal(opened: Opener) -> None:
    terminal = opened(size=(40, 10))
    terminal.wait_for("needs 60 x 15")
    terminal.resize(80, 24)
    terminal.wait_for("embed_tokens")
    for size in [(120, 36), (60, 15), (200, 50), (45, 8), (80, 24)]:
        terminal.resize(*size)
    terminal.wait_for("embed_tokens")
    terminal.leave()


def hues(raw: bytes) -> set[str]:
    """Return all colors in the written bytes that are not black, white or gray (in xterm's palette)."""
    found = set()
    for sequence in re.findall(rb"\x1b\[([0-9;]*)m", raw):
        for kind, number in re.findall(r"(?:^|;)([34]8);5;(\d+)", sequence.decode()):
            if int(number) not in (0, 7, 8, 15, 16, 59, 102, 145, 188, *range(231, 256)):
                found.add(f"{kind};5;{number}")
        rest = re.sub(r"[34]8;[25];[0-9;]+", "", sequence.decode())
        found |= {code for code in rest.split(";") if re.fullmatch(r"[349][1-6]|10[1-6]", code)}
    return found


def test_variable_no_color_removes_all_colors(opened: Opener) -> None:
    terminal = opened(*QUICK, environment={"NO_COLOR": "1"})
    terminal.wait_for("▌ ▾ demo")
    terminal.press("2")
    terminal.wait_for("bf16")
    assert hues(terminal.raw) == set()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no-such-model"], "no such folder or file"),
        (["--cast", "*=bfloat17"], "did you mean bfloat16"),
        (["--cast", "model.layer=bf16"], "matches nothing"),
        (["--recipe", "missing.yaml"], "can't read the recipe"),
        (["--text", PROGRAM[:-9] + "python"], "is not text"),
        (["--bogus"], "No such option"),
    ],
)
def test_invalid_arguments_of_the_app_are_refused_in_one_line(opened: Opener, arguments: list[str], says: str) -> None:
    terminal = opened(*arguments)
    assert terminal.exit_status() == 2
    said = terminal.raw.decode()
    assert says in said
    assert said.startswith("dtype-tui: ")
    assert said.count("\n") == 1
    assert "\x1b" not in said


def test_class_rule_without_matches_is_refused_before_the_screen_is_drawn(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the architecture knows the classes of its modules. To build it takes torch, which the app's process never imports."""
    program = tmp_path / "dtype-tui"
    program.write_text(f"""#!{sys.executable}
import sys
sys.argv[1:1] = [{PROGRAM!r}, {json.dumps(preloaded.command(preloaded.ENGINE))!r}]
try:
    exec({WITH_ENGINE!r})
finally:
    print("torch is there:", "torch" in sys.modules)
""")
    program.chmod(0o755)
    monkeypatch.setattr("tests.helpers.terminal.PROGRAM", str(program))
    terminal = opened("--cast", "type:LlamaMLq=bf16", forked=False)
    assert terminal.exit_status(60) == 2
    assert "the nearest is type:LlamaMLP" in terminal.raw.decode()
    assert "torch is there: False" in terminal.raw.decode()
    terminal = opened("--cast", "type:LlamaMLP=bf16", *QUICK)
    terminal.wait_for("6 modules|12 tensors|bf16")
    terminal.wait_for("perplexity")


def test_app_without_a_terminal_points_to_dtype_engine() -> None:
    done = subprocess.run([PROGRAM], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "dtype-engine" in done.stderr
    assert done.stderr.count("\n") == 1


def test_settings_of_a_recipe_file_apply_in_the_app(opened: Opener, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("version: 1\nsettings: {autocast: bfloat16}\nrules:\n  - {pattern: '*.mlp', dtype: float16}\n")
    opened("--recipe", str(recipe), *QUICK).wait_for("autocast bfloat16")
