"""Files that lie: thousands of mutated headers and indexes, and every form of hostile file through the installed program.

The test run has 2,000 mutations, and `make fuzz` has 100,000; `python -m tests.engine.hostile.test_checkpoints 1000000` runs as
many as one likes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.mutations import changed

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.cli import cli
from dtype_engine.cli import run as run_program
from dtype_engine.core.errors import UserError
from dtype_engine.recipe import Recipe, Rule, make_plan

MUTATIONS = 2_000
LONGEST_S = 1.0


def header() -> dict[str, Any]:
    return {
        "__metadata__": {"format": "pt"},
        "layers.0.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "layers.1.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "empty": {"dtype": "F16", "shape": [0, 5], "data_offsets": [32, 32]},
        "scalar": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
    }


def index() -> dict[str, Any]:
    return {"metadata": {"total_size": 40}, "weight_map": dict.fromkeys(list(header())[1:], "one.safetensors")}


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def flipped(content: bytes, chooser: random.Random) -> bytes:
    """Bytes changed, cut, or put in."""
    data = bytearray(content)
    for _ in range(chooser.randrange(3)):
        what = chooser.random()
        place = chooser.randrange(len(data)) if data else 0
        if what < 0.6 and data:
            data[place] = chooser.randrange(256)
        elif what < 0.8:
            del data[place:]
        else:
            data[place:place] = bytes(chooser.randrange(256) for _ in range(chooser.randrange(1, 9)))
    return bytes(data)


def one(folder: Path, seed: int) -> str:
    """Open a hostile folder made from the seed. Returns the refusal, "" if the folder was read. All errors but UserError are
    raised.
    """
    chooser = random.Random(seed)
    raw = dumped(changed(header(), chooser) if chooser.random() < 0.7 else header())
    length = len(raw) if chooser.random() < 0.9 else chooser.choice([0, 1, len(raw) + 1, 2**31, 2**63, 2**64 - 1])
    content = length.to_bytes(8, "little") + raw + b"\0" * (40 if chooser.random() < 0.9 else chooser.randrange(100))
    for file in folder.iterdir():
        file.unlink()  # many times as fast as to write over it, on ext4
    (folder / "one.safetensors").write_bytes(flipped(content, chooser) if chooser.random() < 0.4 else content)
    whole = dumped(changed(index(), chooser)) if chooser.random() < 0.5 else dumped(index())
    (folder / "model.safetensors.index.json").write_bytes(flipped(whole, chooser) if chooser.random() < 0.2 else whole)
    checkpoint, refusal = None, ""
    try:
        checkpoint = open_checkpoint(folder)
    except UserError as error:
        refusal = str(error)
    assert refusal == "" or refusal.isprintable(), ascii(refusal)
    assert len(refusal) < 2000
    if checkpoint is None:
        return refusal
    size = (folder / "one.safetensors").stat().st_size
    assert all(0 <= tensor.start <= tensor.start + tensor.nbytes <= size for tensor in checkpoint.tensors.values())
    tree = checkpoint.tree()
    make_plan(tree, Recipe((Rule("*", "bfloat16"),)))
    tree.totals()[""].mix()
    return ""


def run(count: int) -> dict[str, float]:
    """Open `count` mutated folders; what was seen. Raises AssertionError for a hang or an allocation out of proportion
    (allocations are traced in every tenth: tracing makes each take three times as long).
    """
    slowest = largest = 0.0
    refused = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for seed in range(count):
            traced = seed % 10 == 0
            if traced:
                tracemalloc.start()
            try:
                started = time.perf_counter()
                refused += bool(one(folder, seed))
                slowest = max(slowest, time.perf_counter() - started)
                if traced:
                    largest = max(largest, tracemalloc.get_traced_memory()[1])
            finally:
                if traced:
                    tracemalloc.stop()
            assert slowest < LONGEST_S, f"seed {seed} took {slowest:.2f} s"
            assert largest < 4_000_000, f"seed {seed} took {largest:.0f} bytes for a file of under 3000"
    return {
        "mutations": count,
        "refused": refused,
        "read": count - refused,
        "slowest_s": slowest,
        "most_bytes": largest,
    }


def test_mutated_headers_and_indexes_are_read_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    seen = run(MUTATIONS)
    with capsys.disabled():
        print(f"\n{seen}")
    assert seen["refused"] > MUTATIONS / 3
    assert seen["read"] > MUTATIONS / 50


def good(name: str = "weight", dtype: str = "F32") -> bytes:
    raw = dumped({name: {"dtype": dtype, "shape": [1], "data_offsets": [0, 4]}})
    return len(raw).to_bytes(8, "little") + raw + b"\0" * 4


def shards(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_bytes(dumped({"weight_map": weight_map}))


def nothing(folder: Path) -> None:
    return None


HOSTILE: dict[str, Callable[[Path], object]] = {
    "nothing": nothing,
    "empty": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "length of 2^63": lambda folder: (folder / "model.safetensors").write_bytes((1 << 63).to_bytes(8, "little") + b"{}"),
    "brackets": lambda folder: (folder / "model.safetensors").write_bytes((10**6).to_bytes(8, "little") + b"[" * 10**6),
    "unknown dtype": lambda folder: (folder / "model.safetensors").write_bytes(good(dtype="\x1b]0;owned\x07")),
    "up and away": lambda folder: shards(folder, {"weight": "../../etc/passwd"}),
    "absolute": lambda folder: shards(folder, {"weight": "/etc/passwd"}),
    "missing shard": lambda folder: shards(folder, {"weight": "\x1b[2Jno.safetensors"}),
    "link out": lambda folder: (folder / "model.safetensors").symlink_to("/etc/passwd"),
    "cycle": lambda folder: (folder / "model.safetensors").symlink_to(folder / "model.safetensors"),
    "fifo": lambda folder: os.mkfifo(folder / "model.safetensors"),
    "fifo for an index": lambda folder: os.mkfifo(folder / "model.safetensors.index.json"),
    "device": lambda folder: (folder / "model.safetensors").symlink_to("/dev/zero"),
    "pickle of nothing": lambda folder: (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N."),
    "gguf with 2^60 tensors": lambda folder: (folder / "x.gguf").write_bytes(
        b"GGUF" + (3).to_bytes(4, "little") + (1 << 60).to_bytes(8, "little") * 2
    ),
    "gguf of noise": lambda folder: (folder / "x.gguf").write_bytes(
        b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") * 2 + random.Random(0).randbytes(4000)
    ),
}  # fmt: skip


ENDLESS = ("fifo", "fifo for an index", "device")
"""Files whose reader would wait or read for ever, and which are therefore opened in separate processes that can be ended."""


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_file_exits_with_one_line_and_status_2(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    HOSTILE[what](tmp_path)
    if what in ENDLESS:
        command = [sys.executable, "-c", "from dtype_engine.cli import main; main()", "inspect", str(tmp_path)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        status, out, said = ran.returncode, ran.stdout, ran.stderr
    else:
        status = run_program(cli, "dtype-engine", ["inspect", str(tmp_path)])
        out, said = capsys.readouterr()
    assert status == 2, said
    assert out == ""
    line = said.removesuffix("\n")
    assert line.startswith("dtype-engine: ")
    assert line.isprintable(), ascii(line)


def test_names_from_files_are_escaped_for_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.safetensors").write_bytes(good("a\x1b]0;owned\x07\n\u202e[bold]" + "n" * 100_000 + ".weight"))
    assert run_program(cli, "dtype-engine", ["inspect", str(tmp_path / "x.safetensors")]) == 0
    out = capsys.readouterr().out
    assert all(character.isprintable() for character in out.replace("\n", ""))
    assert "[bold]" in out


@pytest.mark.parametrize(
    "declared",
    [
        {"quant_method": "\x1b]0;owned\x07"},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {
            "targets": ["\x1b]0;owned\x07", "Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8}}}},
        {"quant_method": "fp8", "weight_block_size": True},
    ],
    ids=["a method", "a target", "blocks"],
)  # fmt: skip
def test_hostile_quantization_config_is_shown_escaped_or_refused_in_one_line(
    make_llama: Callable[..., Path], declared: dict[str, object], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = make_llama()
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": declared}))
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    scale = {f"{name}_scale_inv": torch.ones(1, 1)}
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)} | scale, folder / "model.safetensors")
    capfd.readouterr()  # what making it wrote
    for command in (["inspect"], ["check"], ["weights", "--cast", "*=bf16"], ["drift", "--cast", "*=bf16"],
                    ["export", "--cast", "*.mlp=bf16", "-o", str(tmp_path / "out")]):  # fmt: skip
        status = run_program(cli, "dtype-engine", [command[0], str(folder), *command[1:]])
        out, said = capfd.readouterr()
        assert all(character.isprintable() for character in (out + said).replace("\n", "")), ascii(said)
        assert "unexpected" not in said
        assert status == 0 or (command[0] == "check" and status == 1) or (status == 2 and said.count("\n") == 1), said


if __name__ == "__main__":
    print(run(int(sys.argv[1]) if len(sys.argv) > 1 else MUTATIONS))
