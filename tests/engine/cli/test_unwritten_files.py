"""A file that can't be written after something was measured: the result is printed, one sentence says why, and nothing stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.helpers import preloaded

# No file may grow beyond 200 bytes, which stands for a full disk. Standard output is a pipe.
FULL = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200)); {preloaded.COMMAND}"
DRIFT = ["drift", "--cast", "*.mlp=bf16"]
SCAN = ["--dtypes", "bf16"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "option", "name"),
    [
        (DRIFT, "-o", "recipe.yaml"),
        (DRIFT, "--report", "report.html"),
        (DRIFT, "--save", "drift.json"),
        (["scan", *SCAN], "--save", "scan.json"),
        (["report", "--cast", "*.mlp=bf16"], "-o", "report.md"),
        (["report", "--cast", "*.mlp=bf16", "--model-card"], "-o", "card.md"),
        (["search", *SCAN, "--budget", "90%", "--no-measure"], "-o", "recipe.yaml"),
        (["search", *SCAN, "--budget", "90%", "--no-measure"], "--save", "scan.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_result_is_printed_although_a_file_cannot_be_written(
    arguments: list[str], option: str, name: str, tmp_path: Path
) -> None:
    done = preloaded.run(FULL, *arguments, "--json", option, str(tmp_path / name))
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["model"] == "demo"
    assert f"dtype-engine: can't write {tmp_path / name}: File too large: raise the limit, `ulimit -f`\n" in done.stderr
    assert done.stderr.count("can't write") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("command", [["scan", *SCAN], DRIFT], ids=lambda command: command[0])
def test_unwritable_save_file_is_refused_before_measuring(command: list[str], tmp_path: Path) -> None:
    done = preloaded.run(preloaded.COMMAND, *command, "--save", str(tmp_path / "none" / "x.json"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"dtype-engine: there is no folder {tmp_path / 'none'} to write x.json to\n"


@pytest.mark.slow
def test_missed_limit_is_reported_although_a_file_cannot_be_written(tmp_path: Path) -> None:
    done = preloaded.run(FULL, *DRIFT, "--max-kl", "0", "--json", "-o", str(tmp_path / "recipe.yaml"))
    assert done.returncode == 2
    assert "dtype-engine: --max-kl is missed: " in done.stderr
