"""Exports to one file: torch and safetensors read exactly what `Tensor.to` makes of the source, and no other file is left."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.exporting import engine, export_checkpoint
from torch import nn

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.core.errors import Cancelled, UserError

Make = Callable[..., Path]
RULES = Recipe((Rule("*", "bfloat16"), Rule("head", "float16")))


def source(folder: Path) -> Path:
    """A state dict beside other things, with a tied weight, a buffer of integers and one in float64."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(11, 6), "norm": nn.BatchNorm1d(6), "head": nn.Linear(6, 11)})
    model["head"].weight = model["embed"].weight
    model.register_buffer("steps", torch.arange(3, dtype=torch.float64))
    torch.save({"epoch": 3, "state_dict": model.state_dict()}, folder / "net.pth")
    return folder / "net.pth"


@pytest.mark.parametrize("name", ["cast.pth", "cast.pt", "cast.bin", "cast.ckpt", "cast.safetensors"])
def test_torch_and_safetensors_read_the_cast_values_from_one_file(tmp_path: Path, name: str) -> None:
    before = torch.load(source(tmp_path))["state_dict"]
    checkpoint = open_checkpoint(tmp_path / "net.pth")
    report = export_checkpoint(checkpoint, "net", RULES, tmp_path / name)
    assert (report.folder, report.files) == (str(tmp_path / name), (name,))
    found = load_file(tmp_path / name) if name.endswith("safetensors") else torch.load(tmp_path / name)
    if not name.endswith("safetensors"):
        assert set(found) == set(before), "a tied weight has all of its names"
        assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    for key, value in found.items():
        dtype = torch.float16 if key == "head.bias" else torch.bfloat16
        wanted = before[key].to(dtype) if before[key].is_floating_point() else before[key]
        if key in ("head.weight", "embed.weight"):
            wanted = before[key].to(value.dtype)
            assert value.dtype in (torch.float16, torch.bfloat16)
        assert value.dtype == wanted.dtype
        assert torch.equal(value, wanted), key
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["net.pth", name])


def test_state_dict_exported_to_one_file_loads_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    torch.save(net.state_dict(), tmp_path / "net.pth")
    target = tmp_path / "bf16.pth"
    assert engine("export", tmp_path / "net.pth", "--cast", "*=bf16", "-o", target) == 0
    assert f"written    {target}: 116 B, one file" in capsys.readouterr().out
    net.load_state_dict(torch.load(target, weights_only=True), assign=True)
    assert net(torch.ones(4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert engine("verify", target, "--against", tmp_path / "net.pth") == 0


def test_one_file_export_replaces_files_only_with_force_and_never_the_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net, target = source(tmp_path), tmp_path / "out.pth"
    target.write_text("something else")
    arguments = ("export", net, "--cast", "*=bf16", "-o")
    assert engine(*arguments, target) == 2
    assert "exists; name another file" in capsys.readouterr().err
    assert engine(*arguments, target, "--force") == 0
    assert torch.load(target)["steps"].dtype == torch.bfloat16
    content = net.read_bytes()
    capsys.readouterr()
    assert engine(*arguments, net, "--force") == 2
    assert "is the model that is to be exported" in capsys.readouterr().err
    (tmp_path / "folder.pth").mkdir()
    assert engine(*arguments, tmp_path / "folder.pth", "--force") == 2
    assert "is a folder; name a file in it" in capsys.readouterr().err
    assert net.read_bytes() == content


@pytest.mark.parametrize("name", ["x.pth", "x.safetensors"])
def test_one_file_export_refuses_scaled_formats(tmp_path: Path, make_llama: Make, name: str) -> None:
    checkpoint = open_checkpoint(make_llama())
    with pytest.raises(UserError, match=r"int8\) have scales, which need a config.json; name a folder instead"):
        export_checkpoint(checkpoint, "llama", Recipe((Rule("*.mlp", "int8"),)), tmp_path / name)
    assert not (tmp_path / name).exists()


def test_one_file_export_notes_that_config_and_tokenizer_need_a_folder(tmp_path: Path, make_llama: Make) -> None:
    folder, rules = make_llama(), Recipe((Rule("*", "bfloat16"),))
    target = tmp_path / "x.safetensors"
    report = export_checkpoint(open_checkpoint(folder), "llama", rules, target, max_shard_size=1000)
    assert any("config.json and the tokenizer's files are in an export to a folder" in each for each in report.notices)
    assert len(load_file(target)) == len(load_file(folder / "model.safetensors"))


def test_session_exports_one_file_with_the_planned_dtypes(tmp_path: Path) -> None:
    session = de.open("demo")
    session.cast("*.mlp", "float16")
    session.export(tmp_path / "demo.pt")
    found = torch.load(tmp_path / "demo.pt")
    assert found["model.layers.0.mlp.up_proj.weight"].dtype == torch.float16
    assert sum(value.nbytes for value in found.values()) == session.plan.planned_bytes


@pytest.mark.parametrize("after", [0.3, 0.8])
def test_cancelled_one_file_export_leaves_no_file(tmp_path: Path, after: float) -> None:
    """At a share of 0.3, the weights are being cast; at 0.8, the PyTorch file is being written."""
    checkpoint, share = open_checkpoint(source(tmp_path)), [0.0]

    def on_bytes(done: int, total: int) -> None:
        share[0] = done / total

    with pytest.raises(Cancelled):
        export_checkpoint(
            checkpoint, "net", RULES, tmp_path / "x.pth", on_bytes=on_bytes, cancelled=lambda: share[0] >= after
        )
    assert [path.name for path in tmp_path.iterdir()] == ["net.pth"]


def test_one_file_export_refuses_kv_cache_formats(tmp_path: Path, make_llama: Make) -> None:
    rules = Recipe((Rule("*", "bfloat16"), Rule("*.kv_cache", "fp8")))
    with pytest.raises(UserError, match="the formats of KV caches need the files of a folder; name a folder instead"):
        export_checkpoint(open_checkpoint(make_llama()), "llama", rules, tmp_path / "x.pth")


def test_one_file_export_reports_too_little_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(source(tmp_path))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=500))
    with pytest.raises(UserError, match=r"x.pth needs .* and 500 B are free there"):
        export_checkpoint(checkpoint, "net", RULES, tmp_path / "x.pth")
    assert [path.name for path in tmp_path.iterdir()] == ["net.pth"]
