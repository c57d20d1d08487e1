"""A checkpoint's file that is cut short while its weights are mapped: no signal ends the process, and no figure comes of it.

The damage is done by os.truncate, as another program does it, in processes of their own: what is tested would end this one.
"""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers import preloaded

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="the signal is Linux's"
)

# Torch reads in threads of its own, numpy and Python with the interpreter's lock held.
STORM = """
import os, random, sys, threading, time
from pathlib import Path
import safetensors.torch, torch
from safetensors import safe_open
from dtype_engine.checkpoint import FileIdentity, cut_files
from dtype_engine.core.errors import UserError

path, rounds, guarded = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "guarded"
chance, told = random.Random(3), 0
torch.manual_seed(0)
torch.set_num_threads(4)
weights = {f"w{place}": torch.randn(256, 1024) for place in range(6)}
x = torch.randn(16, 1024)
READERS = (
    lambda t: t.to(torch.bfloat16).float().sum().item(),
    lambda t: (x @ t.T).sum().item(),
    lambda t: t.clone().abs().amax(dim=1).sum().item(),
    lambda t: float(t.numpy().sum()),
    lambda t: bytes(memoryview(t.numpy()).cast("B")),
)
for number in range(rounds):
    path.unlink(missing_ok=True)
    safetensors.torch.save_file(weights, path)
    files = (FileIdentity.of(path),)
    with safe_open(path, "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]
    reader, size, delay = READERS[number % len(READERS)], chance.randrange(path.stat().st_size), chance.uniform(0, 0.004)

    def cut():
        time.sleep(delay)
        os.truncate(path, size)

    def read():
        thread = threading.Thread(target=cut)
        thread.start()
        for _ in range(3):
            for tensor in tensors:
                reader(tensor)
        thread.join()
        for tensor in tensors:  # now there is something missing for certain
            reader(tensor)

    cut_files._cut = frozenset()
    if not guarded:
        read()
        continue
    try:
        with cut_files.unchanged(files):
            read()
    except UserError as error:
        told += "was cut short" in str(error) and str(path) in str(error)
    assert (cut_files._cut != frozenset()) == (size // 4096 < 6 * 1024 * 1024 // 4096), (number, size)
print("told", told)
"""


def storm(path: Path, rounds: int, how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", STORM, str(path), str(rounds), how], capture_output=True, text=True, timeout=250
    )


@pytest.mark.slow
def test_a_file_cut_short_at_any_moment_is_told_every_time(tmp_path: Path) -> None:
    done = storm(tmp_path / "w.safetensors", 40, "guarded")
    assert (done.returncode, done.stdout) == (0, "told 40\n"), done.stderr[-2000:]


@pytest.mark.slow
def test_without_the_handler_the_same_ends_the_process(tmp_path: Path) -> None:
    assert storm(tmp_path / "w.safetensors", 1, "bare").returncode == -signal.SIGBUS


def test_a_file_that_is_no_checkpoint_ends_the_process_as_ever(tmp_path: Path) -> None:
    """The signal is passed on: nothing of another program's data is made up."""
    code = (
        "import mmap, os, sys\n"
        "from dtype_engine.checkpoint import FileIdentity, cut_files\n"
        "from pathlib import Path\n"
        "ours, other = Path(sys.argv[1]) / 'ours', Path(sys.argv[1]) / 'other'\n"
        "for path in (ours, other): path.write_bytes(bytes(1 << 16))\n"
        "cut_files.watch([FileIdentity.of(ours)])\n"
        "maps = [mmap.mmap(os.open(path, os.O_RDWR), 1 << 16) for path in (ours, other)]\n"
        "for path in (ours, other): os.truncate(path, 0)\n"
        "assert maps[0][5000] == 0; print('ours is mended', flush=True); print(maps[1][5000])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGBUS
    assert done.stdout == "ours is mended\n"


def test_a_signal_that_another_process_sends_ends_it_as_ever(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from dtype_engine.checkpoint import FileIdentity, cut_files\n"
        "from pathlib import Path\n"
        "path = Path(sys.argv[1]) / 'ours'; path.write_bytes(bytes(1 << 16))\n"
        "cut_files.watch([FileIdentity.of(path)])\n"
        "os.kill(os.getpid(), signal.SIGBUS)\n"
        "print('lives')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "")


# Where each command has begun to read, its source is cut to half: `CUT` names a function of the program, whose call does it first.
CUTTING = """
import importlib, os, sys
from dtype_engine.cli import cli, run
where, name, path = sys.argv[1:4]
place = importlib.import_module(where)
owner, _, attribute = name.rpartition(".")
owner = getattr(place, owner) if owner else place
before = getattr(owner, attribute)
def cutting(*given, **named):
    os.truncate(path, 40_000)
    return before(*given, **named)
setattr(owner, attribute, cutting)
sys.exit(run(cli, "dtype-engine", sys.argv[4:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "name", "arguments"),
    [
        ("dtype_engine.runtime.measure.drift", "DriftMeter.measure", ["drift", "--cast", "*=bf16"]),
        ("dtype_engine.runtime.session.session", "measure_speed", ["speed", "--cast", "*=int8"]),
        ("dtype_engine.runtime.scan.scan", "Scan.run", ["scan", "--dtypes", "int8"]),
        ("dtype_engine.runtime.measure.weight_errors", "round_trips", ["weights", "--cast", "*=fp8"]),
        ("dtype_engine.runtime.export.export", "write_file", ["export", "--cast", "*=bf16"]),
        ("dtype_engine.runtime.export.export", "write_file", ["export", "--cast", "*=int8"]),
        ("dtype_engine.runtime.export.export", "write_file", ["export"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_whose_source_is_cut_short_says_so_in_one_line(
    where: str, name: str, arguments: list[str], make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_llama(hidden_size=64, intermediate_size=128)
    file = source / "model.safetensors"
    assert file.stat().st_size > 200_000
    command, *rest = arguments
    place = tmp_path / "place"
    place.mkdir()
    more = ["-o", str(place / "out")] if command == "export" else []
    done = preloaded.run(CUTTING, where, name, str(file), command, str(source), *rest, *more)
    assert done.returncode == 2, (done.returncode, done.stderr[-2000:])
    assert done.stderr.count("\n") == 1
    assert f"{file} was cut short" in done.stderr
    assert "open the model again" in done.stderr
    assert done.stdout == ""
    assert list(place.iterdir()) == []
