"""Merged shards of a scan equal the undivided scan; shards that do not belong together are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dtype_engine.cli import cli
from dtype_engine.cli.program import run

pytestmark = pytest.mark.slow
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], make_llama: Callable[..., Path], tmp_path: Path) -> Call:
    """Return a function that runs `scan` on a small Llama with four sequences and returns exit status, output and errors."""
    folder = make_llama(num_hidden_layers=1, dtype="bfloat16")
    ids = torch.randint(0, 64, (4, 1, 8), generator=torch.Generator().manual_seed(1))
    torch.save([{"input_ids": row} for row in ids], tmp_path / "ids.pt")
    capsys.readouterr()

    def scan(*arguments: object, model: Path = folder) -> tuple[int, str, str]:
        words = ["scan", *map(str, arguments)]
        if arguments[0] != "merge":
            words += [str(model), "--inputs", str(tmp_path / "ids.pt"), "--dtypes", "int8,fp8", "--json"]
        status = run(cli, "dtype-engine", words)
        done = capsys.readouterr()
        return status, done.out, done.err

    return scan


def shards(call: Call, folder: Path, count: int, *more: object) -> list[Path]:
    files = [folder / f"{number}.json" for number in range(1, count + 1)]
    for number, file in enumerate(files, 1):
        status, out, err = call("--save", file, "--shard", f"{number}/{count}", *more)
        assert status == 0, err
        assert json.loads(out)["shard"] == f"{number}/{count}"
    return files


def refused(call: Call, words: str, *arguments: object) -> None:
    status, _, err = call(*arguments)
    assert status == 2, err
    assert words in err


def weights(out: str) -> object:
    return json.loads(out)["weights"]


@pytest.mark.parametrize("how", [["--draws", 2], ["--exact"]])
def test_merged_shards_equal_an_undivided_scan(how: Sequence[object], call: Call, tmp_path: Path) -> None:
    status, whole, err = call(*how)
    assert status == 0, err
    assert len({entry["score"] for entry in json.loads(whole)["weights"]}) > 10
    files = shards(call, tmp_path, 3, *how)
    merged = tmp_path / "scan.json"
    # In another order than that of the shards: it makes no difference.
    assert call("merge", *reversed(files), "-o", merged)[0] == 0
    written = merged.read_text()
    status, again, err = call("--save", merged, *how)
    assert status == 0, err
    assert merged.read_text() == written  # all of it was there: nothing was scanned
    assert weights(again) == weights(whole)
    assert json.loads(again)["unit"] == json.loads(whole)["unit"]


def test_merge_refuses_missing_and_unfinished_scan_shards_by_name(call: Call, tmp_path: Path) -> None:
    files = shards(call, tmp_path, 3, "--draws", 1)
    output = tmp_path / "scan.json"
    refused(call, "1 of 4 parts are missing; there is no file of shard 2/3", "merge", files[0], files[2], "-o", output)
    cut = json.loads(files[0].read_text())
    cut["sequences"].pop()
    files[0].write_text(json.dumps(cut))
    refused(call, f"{files[0]} did not finish", "merge", *files, "-o", output)
    assert not output.exists()
    assert call("--save", files[0], "--shard", "1/3", "--draws", 1)[0] == 0  # goes on
    assert call("merge", *files, "-o", output)[0] == 0


def test_merge_refuses_a_shard_of_another_scan(call: Call, make_llama: Callable[..., Path], tmp_path: Path) -> None:
    first, second = shards(call, tmp_path, 2, "--draws", 1)
    other = make_llama("other", num_hidden_layers=1, dtype="bfloat16")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    third = tmp_path / "third.json"
    assert call("--save", third, "--shard", "2/2", "--draws", 1, model=other)[0] == 0
    output = tmp_path / "scan.json"
    refused(call, f"{third} is of another scan than {first}: another model", "merge", first, third, "-o", output)
    assert call("--save", third, "--shard", "2/2", "--draws", 1)[0] == 2  # nor goes on with it
    assert call("--save", tmp_path / "4.json", "--shard", "2/2", "--draws", 3)[0] == 0
    refused(call, "another number of draws", "merge", first, tmp_path / "4.json", "-o", output)
    assert call("merge", first, first, second, "-o", output)[0] == 0  # the same one twice is no harm
    refused(call, "exists", "merge", first, second, "-o", output)


def test_scan_shards_without_sequences_are_empty_and_can_be_merged(call: Call, tmp_path: Path) -> None:
    files = shards(call, tmp_path, 5, "--draws", 1)
    assert json.loads(files[4].read_text())["sequences"] == []
    assert call("merge", *files, "-o", tmp_path / "scan.json")[0] == 0


def test_shard_option_requires_a_save_file(call: Call) -> None:
    refused(call, "--shard needs --save FILE", "--shard", "1/3")
