"""However an export ends: the source is unchanged, and the target is complete or absent."""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers import preloaded
from tests.helpers.exporting import export_checkpoint

from dtype_engine import Recipe, Rule
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.cli import cli, run
from dtype_engine.core.errors import UserError
from dtype_engine.core.export_lock import OLD, PARTIAL, REPLACED, locked, sibling
from dtype_engine.runtime.export.plan import of_checkpoint
from dtype_engine.runtime.measure.planned_casts import casts_in_files
from dtype_engine.runtime.measure.weight_errors import round_trips
from dtype_engine.runtime.verify.source_values import of_files
from dtype_engine.runtime.verify.verify import compare

MOMENTS = 20
RECIPE = Recipe((Rule("*", "float16"), Rule("layer.{0..3}", "float32"), Rule("layer.{4..7}", "float8_e4m3fn")))

EXPORTS = f"""
import os, sys
from pathlib import Path
from dtype_engine import Recipe, Rule
from dtype_engine.checkpoint import open_checkpoint
from tests.helpers.exporting import export_checkpoint
recipe = Recipe(({", ".join(f"Rule({rule.pattern!r}, {rule.dtype!r})" for rule in RECIPE.rules)},))
source, out = map(Path, sys.argv[1:])
export_checkpoint(open_checkpoint(source), "source", recipe, out, max_shard_size="3MB", force=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 12 MiB, in bfloat16."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    tensors = {f"layer.{n}.weight": torch.randn(512, 768).to(torch.bfloat16) for n in range(16)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def contents_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {entry.name: (entry.stat().st_size, entry.stat().st_mtime_ns) for entry in folder.iterdir()}


def is_whole(source: Path, out: Path) -> bool:
    checkpoint = open_checkpoint(source)
    contents = of_checkpoint(checkpoint, "source", RECIPE)
    names = frozenset(item.name for item in contents.items)
    return compare(contents, of_files(checkpoint.files, names, trust=False), out) == ()


def pieces(parent: Path) -> list[Path]:
    """Return the unfinished exports. Empty folders, left by exports that were killed before they wrote anything, do not count."""
    return [folder for folder in parent.glob(".out.partial-*") if os.listdir(folder)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are killed as POSIX has it")
@pytest.mark.parametrize("replacing", [False, True], ids=["a new folder", "with --force"])
def test_sigkill_during_export_leaves_the_old_or_the_new_folder_complete(
    source: Path, tmp_path: Path, replacing: bool
) -> None:
    before = contents_of(source)
    out = tmp_path / "out"
    if replacing:
        export_checkpoint(open_checkpoint(source), "source", RECIPE, out)
    generator = random.Random(5)
    ended: list[int] = []
    whole = math.inf
    for moment in range(-2, MOMENTS):
        program = preloaded.Program(EXPORTS, str(source), str(out))
        started = time.perf_counter()
        if moment >= 0:
            time.sleep(generator.uniform(0, whole))
            with contextlib.suppress(ProcessLookupError):
                program.send_signal(signal.SIGKILL)
        ended.append(program.result().returncode)
        if ended[-1] == 0:  # as the first two always; a machine that is less busy by now takes less long
            whole = min(whole, time.perf_counter() - started)
        assert contents_of(source) == before
        waiting = list(tmp_path.glob(".out.replaced-*/old"))
        assert out.exists() or not replacing or len(waiting) == 1
        if out.exists():
            assert is_whole(source, out), sorted(entry.name for entry in out.iterdir())
            if not replacing:
                shutil.rmtree(out)
        # The next export clears up after the one before it.
        assert len(pieces(tmp_path)) <= 1
    assert ended[:2] == [0, 0]
    assert set(ended) <= {0, -signal.SIGKILL}
    assert ended.count(-signal.SIGKILL) > MOMENTS // 2
    for left in tmp_path.glob(".out.*"):
        os.utime(left, (0, 0))  # those that are empty go when they are old
    export_checkpoint(open_checkpoint(source), "source", RECIPE, out, force=True)
    assert is_whole(source, out)
    assert list(tmp_path.glob(".out.*")) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 10 MiB. Skips the test if no disk can be mounted."""
    parent = tmp_path / "disk"
    parent.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(parent)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.decode().strip()}")
    yield parent
    subprocess.run(["umount", "-l", str(parent)], check=True)


def test_disk_filled_during_export_is_reported(source: Path, small_disk: Path) -> None:
    """The disk has enough room when the export begins. Halfway, another file fills it."""
    before = contents_of(source)
    greedy = small_disk / "somebody else's"

    def fill(done: int, total: int) -> None:
        if done > total // 3 and not greedy.exists():
            with open(greedy, "wb") as file:
                try:
                    while True:
                        file.write(bytes(1 << 16))
                        file.flush()
                except OSError:
                    pass

    small = Recipe((Rule("*", "float8_e4m3fn"),))
    with pytest.raises(UserError, match="No space left on device; nothing was left there"):
        export_checkpoint(open_checkpoint(source), "source", small, small_disk / "out", on_bytes=fill)
    assert [entry.name for entry in small_disk.iterdir()] == [greedy.name]
    with pytest.raises(UserError, match=r"needs 7\.\d+ MiB and .* are free"):
        export_checkpoint(open_checkpoint(source), "source", small, small_disk / "out")
    greedy.unlink()
    export_checkpoint(open_checkpoint(source), "source", small, small_disk / "out")
    assert contents_of(source) == before


@pytest.mark.skipif(sys.platform == "win32", reason="limits are POSIX's")
@pytest.mark.parametrize("most", [4096, 1 << 18, 9 << 18])
def test_file_size_limit_during_export_is_reported(source: Path, tmp_path: Path, most: int) -> None:
    """Unlike a full disk, this needs no special rights: with a limit on file sizes, writing fails in the middle."""
    (tmp_path / "place").mkdir()
    limited = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most})); "
        "from dtype_engine.cli import cli, run; sys.exit(run(cli, 'dtype-engine', sys.argv[1:]))"
    )
    arguments = ["export", str(source), "--cast", "*=float16", "-o", str(tmp_path / "place" / "out")]
    done = preloaded.run(limited, *arguments)
    assert done.returncode == 2, done.stderr
    assert "failed: File too large; nothing was left there" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "place").iterdir()) == []


def export(source: Path, target: Path, **rest: Any) -> Any:
    return export_checkpoint(open_checkpoint(source), "source", RECIPE, target, **rest)


def test_force_option_replaces_exports_and_no_other_folders(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    export(source, out)
    (out / "of the user").write_text("x")
    with pytest.raises(UserError, match="replace it with --force"):
        export(source, out)
    export(source, out, force=True)
    assert not (out / "of the user").exists()
    assert is_whole(source, out)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]

    (out / "folder").mkdir()
    with pytest.raises(UserError, match="holds the folder folder, so it is no export"):
        export(source, out, force=True)
    (out / "folder").rmdir()
    monkeypatch.chdir(out)
    with pytest.raises(UserError, match="the folder that this runs in"):
        export(source, out, force=True)
    monkeypatch.chdir(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(out)
    with pytest.raises(UserError, match="is a link to the folder"):
        export(source, link, force=True)


def test_force_option_never_replaces_the_source(source: Path, tmp_path: Path) -> None:
    before = contents_of(source)
    with pytest.raises(UserError, match="holds the model that is to be exported"):
        export(source, source, force=True)
    # Nor where the folder has only links to the files, as in the cache of Hugging Face.
    blobs, cached = tmp_path / "models--a" / "blobs", tmp_path / "models--a" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    cached.mkdir(parents=True)
    shutil.copyfile(source / "model.safetensors", blobs / "123")
    (cached / "model.safetensors").symlink_to(Path("../../blobs/123"))
    for target in (cached, blobs):
        with pytest.raises(UserError, match="holds the model"):
            export(cached, target, force=True)
        assert run(cli, "dtype-engine", ["export", str(cached), "-o", str(target), "--force"]) == 2
    net = tmp_path / "code" / "net.py"
    net.parent.mkdir()
    net.write_text("import torch\ndef Net(): return torch.nn.Linear(2, 2)\n")
    assert run(cli, "dtype-engine", ["export", f"{net}:Net", "-o", str(net.parent), "--force"]) == 2
    assert net.exists()
    assert (blobs / "123").exists()
    assert contents_of(source) == before


def test_export_killed_between_two_renames_restores_the_replaced_folder(source: Path, tmp_path: Path) -> None:
    """After the first rename, nothing has the folder's name, and the replaced folder lies beside it under another name."""
    out = tmp_path / "out"
    aside = sibling(out, REPLACED)
    aside.mkdir()
    export(source, out)
    out.rename(aside / OLD)
    with pytest.raises(UserError, match="exists and is not empty"):
        export(source, out)
    assert is_whole(source, out)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_export_removes_only_partial_folders_of_dead_processes(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def left(folder: Path) -> Path:
        folder.mkdir()
        (folder / "model.safetensors").write_text("x")
        return folder

    dead = left(sibling(out, PARTIAL))
    alive = left(sibling(out, PARTIAL))
    elsewhere = dead.name.replace(socket.gethostname(), "another.machine")
    others = [
        left(tmp_path / name)
        for name in (
            ".out.partial-plain",
            elsewhere,
            f"{dead.name}.bak",
            dead.name.replace(".out", ".other"),
            dead.name[1:],
        )
    ]
    old, young = sibling(out, PARTIAL), sibling(out, PARTIAL)  # killed before a byte was in it, or about to begin
    for folder in (old, young):
        folder.mkdir()
    os.utime(old, (0, 0))
    link = sibling(out, PARTIAL)
    link.symlink_to(left(tmp_path / "elsewhere"))
    with locked(alive):
        export(source, out)
        assert alive.is_dir()
    assert not dead.exists()
    assert (old.exists(), young.exists()) == (False, True)
    assert all((folder / "model.safetensors").exists() for folder in (*others, alive, link))


README = "# out\n\n`m`, cast by the rules in `recipe.yaml` and written by dtype-engine 0.1.0.\n"


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.txt": "mine", "id_rsa": "secret"},
        {"recipe.yaml": "version: 1\nrules: []\n"},
        {"recipe.yaml": "version: 1\nrules: []\n", "README.md": "# mine\n\nmade by dtype-engine 0.1.0\n"},
        {"recipe.yaml": "flour: 500 g\n", "README.md": README},
    ],
)  # fmt: skip
def test_force_option_does_not_replace_folders_that_are_not_exports(
    source: Path, tmp_path: Path, files: dict[str, str]
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for name, text in files.items():
        (docs / name).write_text(text)
    with pytest.raises(UserError, match="so it is no export and is not replaced"):
        export(source, docs, force=True)
    assert {entry.name: entry.read_text() for entry in docs.iterdir()} == files


def test_force_option_replaces_exports_of_version_0_1_0(source: Path, tmp_path: Path) -> None:
    """The README and the recipe are copies of those that version 0.1.0 wrote."""
    out = tmp_path / "old"
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"")
    (out / "recipe.yaml").write_text(
        "version: 1\nmodel: llama  # what it was made for\nrules:  # the last rule that matches wins\n"
        "  - {pattern: '*', dtype: float16}\n"
    )
    (out / "README.md").write_text(
        "# old\n\n`llama`, cast by the rules in `recipe.yaml` and written by dtype-engine 0.1.0.\n\n| dtype | tensors | bytes |\n"
    )
    export(source, out, force=True)
    assert is_whole(source, out)


def replaced(file: Path) -> None:
    other = file.with_name("other")
    shutil.copyfile(file, other)
    os.replace(other, file)


def overwritten(file: Path) -> None:
    with open(file, "r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"x")


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize(
    ("form", "change"),
    [
        (form, change)
        for form in ("safetensors", "pickle", "gguf")
        for change in (replaced, overwritten, cut_short)
        if (form, change)
        != ("pickle", cut_short)  # torch maps pickles, and reading a page that is gone ends the process
    ],
)
def test_source_that_changes_during_export_is_refused(form: str, change: Any, tmp_path: Path) -> None:
    """What was written by then mixes two versions of the file. It is removed."""
    (tmp_path / "place").mkdir()
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / {"safetensors": "model.safetensors", "pickle": "net.pth", "gguf": "x.gguf"}[form]
    tensors = {f"layer.{n}.weight": torch.full((512, 1024), float(n)) for n in range(8)}
    if form == "safetensors":
        save_file(tensors, file)
    elif form == "pickle":
        torch.save(tensors, file)
    else:
        import gguf

        writer = gguf.GGUFWriter(file, "llama")
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    checkpoint = open_checkpoint(file)
    recipe = Recipe((Rule("*", "float16"), Rule("layer.{4..7}", "float8_e4m3fn")))
    moments = iter((1, 2, 3))

    def meanwhile(done: int, total: int) -> None:
        if done > total // 4 and next(moments, 0) == 1:
            change(file)

    with pytest.raises(UserError, match=f"{file.name} (was|is)"):
        export_checkpoint(checkpoint, "x", recipe, tmp_path / "place" / "out", on_bytes=meanwhile)
    assert list((tmp_path / "place").iterdir()) == []
    with pytest.raises(
        UserError, match=rf"{file.name}(:| was| is)"
    ):  # a header that is read again may be what is wrong
        export_checkpoint(checkpoint, "x", recipe, tmp_path / "place" / "out")
    tree = checkpoint.tree()
    casts = casts_in_files(checkpoint, tree.order, dict.fromkeys(tree.tensors, "float16"))
    with pytest.raises(UserError, match=f"{file.name} (was|is)"):
        list(round_trips(casts, checkpoint.identities))
    assert list((tmp_path / "place").iterdir()) == []


@pytest.mark.parametrize("again", [False, True])
def test_signal_right_after_creating_a_folder_leaves_no_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """A new export makes one folder, and one that replaces another makes two. The signal comes after each."""
    out, mkdir = tmp_path / "out", os.mkdir
    if again:
        export(source, out)
    for folders in range(1, 2 + again):
        made: list[str] = []

        def interrupted(path: str, mode: int = 0o777, folders: int = folders, made: list[str] = made) -> None:
            mkdir(path, mode)
            if Path(path).parent == tmp_path:
                made.append(path)
                if len(made) == folders:
                    raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(os, "mkdir", interrupted)
            with pytest.raises(KeyboardInterrupt):
                export(source, out, force=True)
        assert len(made) == folders
        assert list(tmp_path.iterdir()) == ([out] if again else [])
        assert not again or is_whole(source, out)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are killed as POSIX has it")
def test_killed_pickle_export_leaves_no_incomplete_target(source: Path, tmp_path: Path) -> None:
    """30 moments; hang-up, interrupt and a plain kill clear up after themselves, kill -9 leaves that to the next export."""
    folder, parent = tmp_path / "pickled", tmp_path / "place"
    folder.mkdir()
    parent.mkdir()
    tensors = {name: tensor for name, tensor in load_file(source / "model.safetensors").items() if int(name[6:-7]) < 12}
    torch.save({"state_dict": tensors}, folder / "pytorch_model.bin")
    before = contents_of(folder)
    out = parent / "out"
    casts = [f"{rule.pattern}={rule.dtype}" for rule in RECIPE.rules]
    arguments = [str(folder), "-o", str(out), "--force", "--max-shard-size", "3MB"]
    arguments += [part for cast in casts for part in ("--cast", cast)]
    signals = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    generator = random.Random(7)
    ended: dict[int, list[int]] = {number: [] for number in signals}
    whole = math.inf
    for moment in range(-2, 30):
        there = set(parent.glob(".out.*"))
        program = preloaded.Program(preloaded.COMMAND, "export", *arguments)
        started = time.perf_counter()
        number = signals[moment % len(signals)]
        if moment >= 0:
            # The first signal of each kind comes once the program writes, when it surely answers to signals in its own way. The
            # others come at any time, but for the beginning of a run.
            if moment < len(signals):
                while set(parent.glob(".out.*")) <= there:
                    time.sleep(0.001)
            else:
                time.sleep(generator.uniform(0.3 * whole, whole))
            with contextlib.suppress(ProcessLookupError):
                program.send_signal(number)
        code = program.result().returncode
        if moment < 0:
            whole = time.perf_counter() - started
            assert code == 0
        else:
            ended[number].append(code)
        assert contents_of(folder) == before
        if out.exists():
            assert is_whole(folder, out)
            shutil.rmtree(out)
        left = set(parent.glob(".out.*")) - there
        if number == signal.SIGKILL:
            assert len(left) <= 1
        elif code == 128 + number:
            assert not left
    assert set(ended[signal.SIGKILL]) <= {0, -signal.SIGKILL}
    for number in signals[1:]:
        assert set(ended[number]) <= {0, 128 + number, -number}
        assert 128 + number in ended[number]
    for entry in parent.glob(".out.*"):
        os.utime(entry, (0, 0))  # those that are empty go when they are old
    export(folder, out)
    assert is_whole(folder, out)
    assert [entry.name for entry in parent.iterdir()] == ["out"]
