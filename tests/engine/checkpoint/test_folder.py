"""Checkpoints by their headers: real ones, and broken or hostile ones, each made here by a few readable lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dtype_engine.checkpoint import open_checkpoint, safetensors_header
from dtype_engine.core.errors import UserError


def header_bytes(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(start: int = 0, end: int = 4, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [start, end]}


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[bytes], str]:
    """Return a function that writes a file, expects it to be refused, and returns the error message."""

    def check(content: bytes) -> str:
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)
        with pytest.raises(UserError) as caught:
            open_checkpoint(path)
        message = str(caught.value)
        assert str(path) in message
        assert message.isprintable(), "one line, nothing that a terminal would obey"
        return message

    return check


def test_safetensors_header_gives_names_shapes_dtypes_and_bytes(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.randn(3, 4),
        "a.bias": torch.randn(3).bfloat16(),
        "b.scalar": torch.tensor(2.0, dtype=torch.float64),
        "b.empty": torch.zeros(0, 5),
        "b.ids": torch.arange(6),
        "b.fp8": torch.zeros(8).to(torch.float8_e4m3fn),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    found = open_checkpoint(path)
    assert {name: (t.shape, t.dtype) for name, t in found.tensors.items()} == {
        name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()
    }
    raw = path.read_bytes()
    for name, spec in found.tensors.items():
        expected = tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes() if tensors[name].numel() else b""
        assert raw[spec.start : spec.start + spec.nbytes] == expected
    assert found.metadata == {"format": "pt"}


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_single_and_sharded_folders_are_opened(make_llama: Callable[..., Path], shard: str) -> None:
    folder = make_llama(max_shard_size=shard)
    found = open_checkpoint(folder)
    assert len(found.files) > 1 or shard == "1GB"
    assert found.config is not None
    assert found.config["architectures"] == ["LlamaForCausalLM"]
    tree = found.tree()
    assert len(tree.tensors) == 20
    assert tree.stored_bytes == sum(tensor.nbytes for tensor in found.tensors.values())


def test_missing_shard_is_refused_by_name(make_llama: Callable[..., Path]) -> None:
    folder = make_llama(max_shard_size="20KB")
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(UserError, match=f"shard {gone.name} is missing in {folder}"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "", "a/b.safetensors", "a\0b"])
def test_index_that_names_files_outside_its_folder_is_refused(make_llama: Callable[..., Path], name: str) -> None:
    folder = make_llama(max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(data))
    with pytest.raises(UserError, match="not the name of a file in this folder"):
        open_checkpoint(folder)


def test_shard_that_is_a_symlink_out_of_its_folder_is_refused(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_llama()
    outside = tmp_path / "secret.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(UserError, match="link out of its folder"):
        open_checkpoint(folder)


def test_config_that_is_a_symlink_out_of_its_folder_is_refused(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    """An export would copy the target of the link, which may be a file with passwords."""
    folder = make_llama()
    (folder / "config.json").rename(tmp_path / "secret.json")
    (folder / "config.json").symlink_to(tmp_path / "secret.json")
    for path in (folder, folder / "model.safetensors"):
        with pytest.raises(UserError, match="link out of its folder"):
            open_checkpoint(path)


def test_hub_cache_with_symlinks_to_blobs_is_read(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_llama()
    cache = tmp_path / "hub" / "models--a--b"
    snapshot = cache / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, file in enumerate(folder.iterdir()):
        file.rename(cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(cache / "blobs" / str(number))
    assert len(open_checkpoint(snapshot).tensors) == 20


def test_folder_without_a_model_says_which_files_were_expected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="no PyTorch file"):
        open_checkpoint(tmp_path)


def test_config_with_invalid_json_is_refused(make_llama: Callable[..., Path]) -> None:
    folder = make_llama()
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not valid JSON"):
        open_checkpoint(folder)


DTYPES = ("F7", 3, None, ["F32"])
SHAPES = ([-1], [1.0], "1", None, [True], [1] * 100, [[1]])
ENTRIES = ({"dtype": "F32"}, 3, [], {"dtype": "F32", "shape": [1], "data_offsets": [0]})
INVALID: list[tuple[bytes, str]] = [
    (b"1234567", "too few"),
    ((1 << 63).to_bytes(8, "little") + b"{}", "over the limit"),
    ((1000).to_bytes(8, "little") + b"{}", "truncated"),
    (header_bytes({"a": entry(0, 4)}, b"123"), "outside the file"),
    (header_bytes(b"[" * 200_000), "not valid JSON"),
    (header_bytes(b'{"a": ' + b"9" * 100_000 + b"}"), "not valid JSON"),
    (header_bytes({"a": entry(0, 4), "b": entry(2, 6)}, b"12345678"), "overlaps"),
    (header_bytes({"a": entry(0, 4), "b": entry(8, 12)}, b"123456789012"), "leaves a hole"),
    (header_bytes({"a": entry(0, 4)}, b"1234567"), "belong to nothing"),
    (header_bytes({"a": entry(0, 4, (2,))}, b"1234"), "needs 8 bytes"),
    (header_bytes({"a": entry(0, 4, (1 << 40, 1 << 40, 1 << 40))}, b"1234"), "needs"),
    (header_bytes(b'{"a": ENTRY, "a": ENTRY}'.replace(b"ENTRY", json.dumps(entry()).encode()), b"1234"), "twice"),
    (header_bytes({"": entry()}, b"1234"), "without a name"),
    *((header_bytes({"a": entry(dtype=dtype)}, b"1234"), "unknown dtype") for dtype in DTYPES),
    *((header_bytes({"a": entry(shape=shape)}, b"1234"), "no valid shape") for shape in SHAPES),
    *((header_bytes({"a": each}, b"1234"), "needs dtype, shape and data_offsets") for each in ENTRIES),
]


@pytest.mark.parametrize("place", range(len(INVALID)), ids=[f"{n} {says}" for n, (_, says) in enumerate(INVALID)])
def test_invalid_header_is_refused_with_the_reason(refused: Callable[[bytes], str], place: int) -> None:
    content, says = INVALID[place]
    assert says in refused(content)


def test_empty_shape_with_overflowing_strides_is_refused(refused: Callable[[bytes], str]) -> None:
    assert "a shape that is too large" in refused(header_bytes({"a": entry(0, 0, (1 << 62, 1 << 62, 0))}, b""))


def test_control_characters_in_names_are_escaped_in_errors(refused: Callable[[bytes], str]) -> None:
    name = "\x1b]0;owned\x07\n\u202eevil[bold red]" + "x" * 100_000
    message = refused(header_bytes({name: entry(dtype="F7")}, b"1234"))
    assert len(message) < 400


def test_header_with_too_many_tensors_is_refused_before_parsing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[[bytes], str]
) -> None:
    entries = ",".join(f'"t{i}":{{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}}' for i in range(620_000))
    parsed: list[int] = []
    monkeypatch.setattr(safetensors_header.json, "loads", lambda text, **how: parsed.append(len(text)))
    assert "over 500,000 tensors" in refused(header_bytes(f"{{{entries}}}".encode()))
    assert parsed == []
    monkeypatch.undo()
    monkeypatch.setattr(safetensors_header, "MOST_TENSORS", 10)
    for count, fits in ((10, True), (11, False)):
        tensors = {f"t{i}": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]} for i in range(count)}
        said = json.dumps({"__metadata__": {"more": "{" * 9}} | tensors).encode()
        file = tmp_path / "x.safetensors"
        file.write_bytes(len(said).to_bytes(8, "little") + said)
        if fits:
            assert len(safetensors_header.read_header(file)[0]) == count
        else:
            with pytest.raises(UserError, match="over 10 tensors"):
                safetensors_header.read_header(file)


@pytest.mark.parametrize(
    "make", [lambda path: os.mkfifo(path), lambda path: path.symlink_to("/dev/zero")], ids=["fifo", "device"]
)
def test_special_files_are_not_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "model.safetensors"
    make(path)
    with pytest.raises(UserError, match="not a regular file"):
        open_checkpoint(path)


def test_cycle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "model.safetensors")
    with pytest.raises(UserError):
        open_checkpoint(tmp_path)
