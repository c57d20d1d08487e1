"""A file that changed after it was opened is recognized, whatever the change was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dtype_engine.checkpoint.file_identity import FileIdentity, refuse_changed
from dtype_engine.core.errors import UserError


def overwrite(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(b"y")


def overwrite_and_restore_the_time(path: Path) -> None:
    before = os.stat(path)
    overwrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"y")


def replace(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy2(path, other)  # the same bytes and the same time of change: another file nevertheless
    os.replace(other, path)


def truncate(path: Path) -> None:
    os.truncate(path, 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (overwrite, "was written to"),
        (
            overwrite_and_restore_the_time,
            "was written to and its time set back, or its name or permissions were changed,",
        ),
        (append, "was written to"),
        (replace, "was replaced by another file"),
        (truncate, "was cut short: it had 3 bytes and has 1"),
        (Path.unlink, "is not there any more"),
    ],
)
def test_file_that_changed_after_opening_is_refused_by_name(
    tmp_path: Path, change: Callable[[Path], object], says: str
) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(b"xxx")
        os.utime(file, (1, 1))
    opened = [FileIdentity.of(file) for file in files]
    refuse_changed(opened)
    change(files[1])
    with pytest.raises(UserError) as caught:
        refuse_changed(opened)
    assert f"{files[1]} {says}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_symlink_is_identified_by_its_target_file(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"xxx")
    (tmp_path / "link").symlink_to(tmp_path / "blob")
    opened = FileIdentity.of(tmp_path / "link")
    assert opened.size == 3
    assert opened.change() is None
    truncate(tmp_path / "blob")
    assert "was cut short" in str(opened.change())


def test_missing_file_raises_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"can't read .*: No such file or directory"):
        FileIdentity.of(tmp_path / "none")


def test_identities_of_an_open_model_name_the_files_of_its_weights(
    make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """Tests checkpoints of every form, live models, and user code with weights."""
    import torch
    from safetensors.torch import load_file
    from tests.helpers.paths import TINYNET

    import dtype_engine as de
    from dtype_engine.checkpoint import open_checkpoint

    folder = make_llama(max_shard_size="20KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert {file.path for file in open_checkpoint(folder).identities} == set(shards)
    assert {file.path for file in de.open(str(folder)).model.identities} == set(shards)
    torch.save(load_file(shards[0]), tmp_path / "x.pth")
    assert [file.path for file in open_checkpoint(tmp_path / "x.pth").identities] == [tmp_path / "x.pth"]
    code = de.open(f"{TINYNET}:TinyNet")
    assert code.model.identities == ()
    torch.save(code.model.module.state_dict(), tmp_path / "net.pth")
    session = de.open(f"{TINYNET}:TinyNet", options=de.Options(weights=tmp_path / "net.pth"))
    assert [file.path for file in session.model.identities] == [tmp_path / "net.pth"]
    append(tmp_path / "net.pth")
    with pytest.raises(UserError, match="was written to"):
        refuse_changed(session.model.identities)
