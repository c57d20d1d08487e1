"""Headers of GGUF files are read as by the gguf package, and inconsistent headers are refused."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from tests.helpers.gguf_files import gguf_file

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.gguf_header import read_gguf_header
from dtype_engine.core.errors import UserError

HOST = gguf.GGUFEndian.LITTLE


def written(path: Path, order: gguf.GGUFEndian = HOST, tensors: int = 3, alignment: int | None = None) -> Path:
    """Write a GGUF file with a field of every type and tensors of several types by the gguf package."""
    with gguf_file(path, "llama", endianess=order) as writer:
        if alignment:
            writer.add_custom_alignment(alignment)
        writer.add_name("a näme")
        writer.add_tags(["one", "two", ""])
        writer.add_string("x.text", "some text")
        integers = (f"{sign}int{bits}" for sign in ("u", "") for bits in (8, 16, 32, 64))
        for kind in (*integers, "float32", "float64", "bool"):
            getattr(writer, f"add_{kind}")(f"general.{kind}", 1)
        writer.add_array("tokenizer.ggml.tokens", [f"token{number}" for number in range(500)])
        writer.add_array("tokenizer.ggml.scores", [float(number) for number in range(500)])
        writer.add_array("general.numbers", list(range(300)))
        values = np.arange(64, dtype=np.float32).reshape(2, 32)
        for number in range(tensors):
            if number % 3 == 2:
                blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_0)
                writer.add_tensor(f"blk.{number}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
            else:
                writer.add_tensor(f"blk.{number}.weight", values.astype(np.float16 if number % 3 else np.float32))
    return path


@pytest.mark.parametrize("order", [gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.BIG])
@pytest.mark.parametrize("alignment", [None, 64, 8])
def test_gguf_header_equals_that_of_the_gguf_package(
    tmp_path: Path, order: gguf.GGUFEndian, alignment: int | None
) -> None:
    path = written(tmp_path / "x.gguf", order, alignment=alignment)
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    assert header.swapped == (reader.byte_order == "S")
    assert header.data_start == reader.data_offset
    assert [(one.name, one.shape, one.kind, header.data_start + one.start) for one in header.tensors] == [
        (one.name, tuple(reversed(one.shape.tolist())), int(one.tensor_type), int(one.data_offset))
        for one in reader.tensors
    ]


@pytest.mark.slow
def test_gguf_header_of_100000_tensors_is_read_quickly(tmp_path: Path) -> None:
    """It takes a second or two; the reader of the gguf package takes half a minute."""
    path = tmp_path / "many.gguf"
    count = 100_000
    entries = b"".join(
        text(f"blk.{number}.weight") + struct.pack("<IQIQ", 1, 1, 0, 32 * number) for number in range(count)
    )
    head = b"GGUF" + struct.pack("<IQQ", 3, count, 0) + entries
    path.write_bytes(head + b"\0" * (-len(head) % 32 + 32 * count))
    assert len(open_checkpoint(path).tensors) == count


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def with_field(kind: int, value: bytes, name: str = "x") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(name) + struct.pack("<I", kind) + value + b"\0" * 200


def with_tensor(
    dimensions: int = 1, extents: tuple[int, ...] = (4,), kind: int = 0, start: int = 0, name: str | bytes = "t"
) -> bytes:
    entry = text(name) + struct.pack(f"<I{len(extents)}QIQ", dimensions, *extents, kind, start)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry
    return head + b"\0" * (-len(head) % 32 + 64)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "2^60 numbers": (with_field(9, struct.pack("<IQ", 4, 1 << 60)), "field 'x' claims"),
    "2^60 texts": (with_field(9, struct.pack("<IQ", 8, 1 << 60)), "field 'x' claims"),
    "2^60 lists": (with_field(9, struct.pack("<IQ", 9, 1 << 60)), "field 'x' claims"),
    "lists of lists of lists": (with_field(9, struct.pack("<IQ", 9, 1) * 9), "deep"),
    "a text of 2^62": (with_field(8, struct.pack("<Q", 1 << 62)), "field 'x' claims"),
    "texts that run over": (with_field(9, struct.pack("<IQ", 8, 3) + struct.pack("<Q", 250)), "truncated or damaged"),
    "no such type": (with_field(999, b""), "is of type 999, which GGUF does not have"),
    "no such type in a list": (with_field(9, struct.pack("<IQ", 13, 1)), "which GGUF does not have"),
    "alignment 0": (with_field(4, struct.pack("<I", 0), "general.alignment"), "power of two"),
    "alignment 3": (with_field(4, struct.pack("<I", 3), "general.alignment"), "power of two"),
    "alignment as text": (with_field(8, text("32"), "general.alignment"), "power of two"),
    "field twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (text("x") + struct.pack("<IB", 0, 1)) * 2 + b"\0" * 99,
        "the field 'x' twice",
    ),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + b"\0" * 99, "version 1"),
    "2^40 fields": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40) + b"\0" * 99, "1099511627776 fields"),
    "2^31 dimensions": (with_tensor(dimensions=1 << 31), "2147483648 dimensions"),
    "9 dimensions": (with_tensor(9, (1,) * 9), "9 dimensions"),
    "2^62 values": (with_tensor(extents=(1 << 62,)), "lie outside"),
    "2^62 by 2^62 values": (with_tensor(2, (1 << 62, 1 << 62)), "lie outside"),
    "0 by 2^63 values": (with_tensor(2, (0, 1 << 63)), "a shape that is too large"),
    "a place at 2^63": (with_tensor(start=(1 << 64) - 32), "lie outside"),
    "type 999": (with_tensor(kind=999), "is of type 999, which the gguf package does not know"),
    "half a block": (with_tensor(extents=(31,), kind=8), "rows of 31 values in blocks of 32"),
    "no name": (with_tensor(name=""), "no name"),
    "name not UTF-8": (with_tensor(name=b"\xff\xfe"), "not UTF-8"),
    "name of 2^63": (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1 << 63) + b"\0" * 99, "tensor 1 claims"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_invalid_gguf_header_is_refused_in_one_sentence(tmp_path: Path, what: str) -> None:
    content, says = HOSTILE[what]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as caught:
            open_checkpoint(path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    said = str(caught.value)
    assert says in said
    assert str(path) in said
    assert said.isprintable()
    assert not any(word in said for word in ("np.", "numpy", "dtype", "uint", "OrderedDict"))
    assert most < 20_000_000  # the gguf package's constants are most of it


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_damaged_gguf_files_are_read_or_refused(tmp_path: Path, seed: int) -> None:
    good = written(tmp_path / "good.gguf").read_bytes()
    path = tmp_path / "x.gguf"
    chooser = random.Random(seed)
    refused = 0
    for _ in range(300):
        data = bytearray(good)
        for _ in range(chooser.randrange(1, 4)):
            data[chooser.randrange(min(len(data), 400) if chooser.random() < 0.7 else len(data))] = chooser.randrange(
                256
            )
        path.write_bytes(data[: chooser.randrange(len(data)) if chooser.random() < 0.2 else len(data)])
        opened, refusal = None, ""
        try:
            opened = open_checkpoint(path)
        except UserError as error:
            refusal = str(error)
        refused += bool(refusal)
        assert refusal.isprintable()
        for tensor in opened.tensors.values() if opened is not None else ():
            assert tensor.start is not None
            assert tensor.start + tensor.nbytes <= path.stat().st_size
    assert 30 < refused < 300
