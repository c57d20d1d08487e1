from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save
from tests.helpers.gguf_files import gguf_file

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.file_kind import kind_of
from dtype_engine.checkpoint.source import locate
from dtype_engine.core.errors import UserError

HELD = {"layer.weight": torch.arange(6.0).reshape(2, 3)}


def pickled(legacy: bool) -> bytes:
    stream = io.BytesIO()
    torch.save(HELD, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


def written_by_gguf(at: Path) -> bytes:
    with gguf_file(at / "made", "llama") as writer:
        writer.add_tensor("layer.weight", numpy.arange(6, dtype=numpy.float32).reshape(2, 3))
    return (at / "made").read_bytes()


@pytest.mark.parametrize("name", ["epoch_3", "net.pth.tar", "0f3a9c", "best.model"])
@pytest.mark.parametrize("kind", ["pickle", "legacy", "safetensors", "gguf"])
def test_file_kind_is_recognized_by_content(kind: str, name: str, tmp_path: Path) -> None:
    contents = {
        "pickle": lambda: pickled(legacy=False),
        "legacy": lambda: pickled(legacy=True),
        "safetensors": lambda: save(HELD),
        "gguf": lambda: written_by_gguf(tmp_path),
    }
    file = tmp_path / name
    file.write_bytes(contents[kind]())
    assert kind_of(file) == {"legacy": "pickle"}.get(kind, kind)
    assert locate(str(file)).kind == "checkpoint"
    assert open_checkpoint(file).tree().tensors["layer.weight"].shape == (2, 3)


def test_file_of_unknown_kind_is_refused(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("notes.txt", "none")
    for content in (
        b"",
        b"{",
        b"PK",
        b"\x80\x02\x8a\n",
        archive.getvalue(),
        b"\xff" * 8 + b"{",
        b"\x01" + bytes(7) + b"[",
    ):
        file = tmp_path / "net.model"
        file.write_bytes(content)
        assert kind_of(file) is None
        with pytest.raises(UserError, match="is no checkpoint"):
            locate(str(file))
    assert kind_of(tmp_path) is None
    assert kind_of(tmp_path / "nowhere") is None
