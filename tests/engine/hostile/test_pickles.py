"""Pickles that are small as files, but large or deeply nested when they are loaded."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.helpers import preloaded

from dtype_engine.checkpoint import open_checkpoint, pickle_size
from dtype_engine.core.errors import UserError


def zipped(path: Path, data: bytes, compression: int = zipfile.ZIP_DEFLATED) -> None:
    """Write an archive as torch does, with `data` as its pickle."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("x/data.pkl", data)
        archive.writestr("x/version", "3\n")
        archive.writestr("x/byteorder", "little")


def many(count: int) -> bytes:
    """Return a pickle of a dictionary with `count` empty lists, each of which takes one byte."""
    return b"\x80\x02}X\x01\x00\x00\x00a(" + b"]" * count + b"ls."


def legacy(path: Path, data: bytes) -> None:
    head = io.BytesIO()
    for part in (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}):
        pickle.dump(part, head, protocol=2)
    path.write_bytes(head.getvalue() + data)


BOMBS: dict[str, Callable[[Path], None]] = {
    "stored steps": lambda path: zipped(path, many(5_000_000), zipfile.ZIP_STORED),
    "deflated text": lambda path: zipped(path, b"\x80\x02X\x00\x00\x00\x08" + b"a" * (1 << 27) + b"."),
    "legacy steps": lambda path: legacy(path, many(5_000_000)),
}

CODE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))  # torch alone takes two of address space
from dtype_engine.cli import main
try:
    main()
finally:
    status = open("/proc/self/status").read()
    print(int(status.partition("VmHWM:")[2].split()[0]), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", BOMBS)
def test_memory_of_unpickling_is_limited(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x.pth"
    BOMBS[what](path)
    done = preloaded.run(CODE, "inspect", str(path))
    path.unlink()
    said, most = done.stderr.splitlines()
    assert done.returncode == 2
    assert said.startswith(f"dtype-engine: {path}")
    assert "steps" in said or "inflates" in said
    assert int(most) < 1_500_000  # KiB


def test_pickles_of_torch_save_stay_below_the_limit_of_opcodes(tmp_path: Path) -> None:
    """Tests both formats of torch.save. The limit is far above what models with this number of tensors need."""
    tensors = {f"layers.{number}.mlp.gate_proj.weight": torch.ones(1) for number in range(1000)}
    for old in (False, True):
        torch.save(tensors, tmp_path / "x.pth", _use_new_zipfile_serialization=not old)
        assert len(open_checkpoint(tmp_path / "x.pth").tensors) == 1000
        with (tmp_path / "x.pth").open("rb") as file:
            if not old:
                file = io.BytesIO(zipfile.ZipFile(file).read("x/data.pkl"))  # type: ignore[assignment]
            steps = sum(1 for _ in range(4 if old else 1) for _ in pickle_size.some_opcodes(file))
        assert steps < 1000 * pickle_size.MOST_OPCODES / 100_000


@pytest.mark.parametrize("parts", [5000, 100_000])
def test_tensor_name_with_many_parts_is_refused(tmp_path: Path, parts: int) -> None:
    torch.save({".".join(["a"] * parts): torch.ones(1), "b": torch.ones(1)}, tmp_path / "x.pth")
    with pytest.raises(UserError, match="parts, which no module has"):
        open_checkpoint(tmp_path / "x.pth").tree()


def test_tensor_name_with_150_parts_is_read(tmp_path: Path) -> None:
    name = ".".join(["a"] * 150)
    torch.save({name: torch.ones(1)}, tmp_path / "x.pth")
    tree = open_checkpoint(tmp_path / "x.pth").tree()
    assert list(tree.tensors) == [name]
    assert len(tree.modules) == 150


def test_memory_of_tensor_files_as_inputs_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from dtype_engine.runtime.inputs.tensor_files import read_tensors

    monkeypatch.setattr(pickle_size, "MOST_OPCODES", 1000)
    for name, write in (("a.pt", zipped), ("b.pt", legacy)):
        write(tmp_path / name, many(2000))
        with pytest.raises(UserError, match="steps"):
            read_tensors(tmp_path / name)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 50,)})
    with zipfile.ZipFile(tmp_path / "c.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", header.getvalue() + bytes(1 << 20))
    with pytest.raises(UserError, match="are stored of it; the file is damaged"):
        read_tensors(tmp_path / "c.npz")
    np.savez_compressed(tmp_path / "d.npz", x=np.zeros(1 << 22, np.float32))
    assert read_tensors(tmp_path / "d.npz")["x"].numel() == 1 << 22
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    with pytest.raises(UserError, match="inflates to"):
        read_tensors(tmp_path / "d.npz")
