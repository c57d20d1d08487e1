"""Checkpoints with missing tensors: inspect, drift, scan, search and export name the missing tensors and give the share found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.check import check
from dtype_engine.cli import cli
from dtype_engine.cli.program import run

DOWN = "model.layers.1.mlp.down_proj.weight"
Spoil = Callable[[Path], None]


def _index(folder: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads((folder / "model.safetensors.index.json").read_text())
    return found


def _ghost(folder: Path) -> None:
    shard = folder / _index(folder)["weight_map"][DOWN]
    save_file({name: tensor for name, tensor in load_file(shard).items() if name != DOWN}, shard, {"format": "pt"})


def _left_out(folder: Path) -> None:
    index = _index(folder)
    shard = folder / index["weight_map"][DOWN]
    held = load_file(shard)
    save_file({DOWN: held.pop(DOWN)}, folder / "model-extra.safetensors", {"format": "pt"})
    save_file(held, shard, {"format": "pt"})
    del index["weight_map"][DOWN]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _prefixed(folder: Path) -> None:
    index = _index(folder)
    for shard in set(index["weight_map"].values()):
        held = load_file(folder / shard)
        save_file({f"language_model.{name}": tensor for name, tensor in held.items()}, folder / shard, {"format": "pt"})
    index["weight_map"] = {f"language_model.{name}": file for name, file in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


CASES: dict[str, tuple[Spoil, str, str]] = {
    "a tensor that no shard has": (_ghost, "20 of 21 tensors found", DOWN),
    "a file that the index leaves out": (_left_out, "20 of 21 tensors found", "model-extra.safetensors"),
    "another prefix": (_prefixed, "0 of 21 tensors found", "language_model."),
}


@pytest.fixture
def sharded(make_llama: Callable[..., Path]) -> Path:
    return make_llama(max_shard_size="20KB", tie_word_embeddings=False)


@pytest.mark.parametrize("case", CASES)
def test_inspect_names_missing_tensors_and_export_refuses_them(
    case: str, sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, share, named = CASES[case]
    spoil(sharded)
    assert run(cli, "dtype-engine", ["inspect", str(sharded)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(share)
    assert named in first
    assert run(cli, "dtype-engine", ["drift", str(sharded), "--sequences", "1"]) == 2
    said = capsys.readouterr()
    assert share in said.err
    assert named in said.err
    assert not said.out
    for command in (["scan"], ["search", "--budget", "60%"]):
        assert run(cli, "dtype-engine", [*command, str(sharded), "--sequences", "1", "--dtypes", "bf16"]) == 2
        assert capsys.readouterr().err == said.err
    out = tmp_path / "out"
    assert run(cli, "dtype-engine", ["export", str(sharded), "--cast", "*=bf16", "-o", str(out)]) == 2
    refusal = capsys.readouterr().err
    assert share in refusal
    assert named in refusal
    assert not out.exists()
    rules = [] if spoil is _prefixed else ["--cast", "*=bf16"]
    assert run(cli, "dtype-engine", ["export", str(sharded), *rules, "-o", str(out), "--incomplete"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(share)


def test_inspect_says_that_a_checkpoint_is_complete(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli, "dtype-engine", ["inspect", str(sharded)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "21 of 21 tensors found"
    assert run(cli, "dtype-engine", ["inspect", str(sharded), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["found"], found["expected"], found["incomplete"]) == (21, 21, [])
    assert run(cli, "dtype-engine", ["export", str(sharded), "-o", str(tmp_path / "out")]) == 0
    assert "21 of 21 tensors found" in capsys.readouterr().out.splitlines()[0]


def test_scan_and_search_print_the_number_of_found_tensors_first(
    sharded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = [str(sharded), "--sequences", "1", "--draws", "1", "--dtypes", "bf16"]
    for command in (["scan"], ["search", "--budget", "60%"]):
        assert run(cli, "dtype-engine", [*command, *quick]) == 0
        assert capsys.readouterr().out.splitlines()[0].endswith("; 21 of 21 tensors found")
    _ghost(sharded)
    for command in (["scan"], ["search", "--budget", "60%"]):
        assert run(cli, "dtype-engine", [*command, *quick, "--random-weights"]) == 0
        assert capsys.readouterr().out.splitlines()[0].endswith("; 20 of 21 tensors found")
        assert run(cli, "dtype-engine", [*command, *quick, "--random-weights", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["coverage"]["missing"] == [DOWN]


def test_check_reports_a_wrong_total_size_in_the_index(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert check(open_checkpoint(sharded), "x").findings == ()
    index["metadata"]["total_size"] += 1
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    (finding,) = check(open_checkpoint(sharded), "x").findings
    held = sum(tensor.nbytes for file in sharded.glob("*.safetensors") for tensor in load_file(file).values())
    assert (finding.kind, finding.tensor) == ("index-entry", "total_size")
    assert finding.what == f"is {held + 1:,}, and the tensors have {held:,} bytes"


def test_index_that_names_the_wrong_shard_of_a_tensor_gives_a_notice(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = _index(sharded)
    other = next(file for file in index["weight_map"].values() if file != index["weight_map"][DOWN])
    holder, index["weight_map"][DOWN] = index["weight_map"][DOWN], other
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run(cli, "dtype-engine", ["drift", str(sharded), "--sequences", "1"]) == 0
    assert f"{DOWN}: {other}, and {holder} has it" in capsys.readouterr().err
    assert run(cli, "dtype-engine", ["export", str(sharded), "-o", str(tmp_path / "out")]) == 0
    assert f"{DOWN}: {other}, and {holder} has it" in capsys.readouterr().err


def test_tensor_in_two_files_is_refused(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The index maps the name to a new file, and the stale copy is still in its shard."""
    index = _index(sharded)
    stale = index["weight_map"][DOWN]
    save_file({DOWN: load_file(sharded / stale)[DOWN] * 3}, sharded / "model-overlay.safetensors", {"format": "pt"})
    index["weight_map"][DOWN] = "model-overlay.safetensors"
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run(cli, "dtype-engine", ["drift", str(sharded)]) == 2
    said = capsys.readouterr().err
    assert f"{DOWN} is in {stale} and again in model-overlay.safetensors" in said
