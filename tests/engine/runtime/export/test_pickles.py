"""Pickles in every shape that torch.save gives them: what is exported is what torch.load reads, or it is refused by name."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_model
from tests.helpers.exporting import engine, same_bits
from torch import nn

import dtype_engine as de
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.core.errors import UserError
from dtype_engine.runtime.inputs.tensor_files import read_tensors
from dtype_engine.runtime.weights.source import PlainSource

Make = Callable[..., Path]


NEW = ("fixed.fp8", "fixed.fp4")
"""Tensors that torch itself can't read back from a file of the old format."""


def tensors() -> dict[str, torch.Tensor]:
    """Tensors of many dtypes, some of them views of one storage."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 8, generator=generator)
    return {
        "layer.transposed": base.t(),
        "layer.sliced": base[1:5, ::3],
        "layer.expanded": torch.randn(1, 4, generator=generator).expand(5, 4),
        "layer.double": torch.randn(7, dtype=torch.float64, generator=generator),
        "layer.bf16": torch.randn(3, 3, generator=generator).bfloat16(),
        "layer.scalar": torch.tensor(2.5),
        "layer.empty": torch.zeros(0, 3),
        "fixed.steps": torch.tensor([7, -1]),
        "fixed.mask": torch.tensor([True, False]),
        "fixed.complex": torch.randn(2, 2, dtype=torch.complex64, generator=generator).conj(),
        "fixed.fp8": torch.randn(4, generator=generator).to(torch.float8_e4m3fn),
        "fixed.fp4": torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).view(2, 4),
    }


def zipped_again(
    path: Path, change: Callable[[str, bytes], bytes] = lambda name, data: data, deflate: bool = True
) -> None:
    """Write a zip archive anew, its records changed, or compressed as other programs would."""
    with zipfile.ZipFile(path) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    how = zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, data in records.items():
            archive.writestr(name, change(name, data))


FORMS: dict[str, Callable[[dict[str, torch.Tensor], Path], None]] = {
    "zip": lambda held, path: torch.save(held, path),
    "legacy": lambda held, path: torch.save(held, path, _use_new_zipfile_serialization=False),
    "nested": lambda held, path: torch.save({"epoch": 3, "state_dict": held}, path),
    "deflated": lambda held, path: (torch.save(held, path), zipped_again(path))[1],
}


@pytest.mark.parametrize("form", FORMS)
def test_exported_pickle_has_the_cast_values_of_torch_load(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.pth"
    saved = {name: tensor for name, tensor in tensors().items() if form != "legacy" or name not in NEW}
    FORMS[form](saved, path)
    source = torch.load(path, weights_only=True)
    source = source.get("state_dict", source)
    assert all(same_bits(source[name], tensor) for name, tensor in saved.items())  # what torch reads is what was saved
    assert engine("export", path, "-o", tmp_path / "same") == 0
    assert engine("export", path, "--cast", "layer=fp16", "--cast", "layer.sliced=fp8", "-o", tmp_path / "cast") == 0
    same, cast = (load_file(tmp_path / name / "model.safetensors") for name in ("same", "cast"))
    assert same.keys() == source.keys()
    for name, tensor in source.items():
        assert same_bits(same[name], tensor), name
        if name == "layer.sliced":
            scale = tensor.abs().amax(dim=1) / 448
            assert torch.equal(cast[f"{name}_scale"].reshape(-1), scale)
            assert same_bits(cast[f"{name}_quantized"], (tensor / scale[:, None]).to(torch.float8_e4m3fn))
        else:
            assert same_bits(cast[name], tensor.half() if name.startswith("layer") else tensor), name
    capsys.readouterr()
    for name in ("same", "cast"):
        assert engine("verify", tmp_path / name, "--against", path) == 0
    assert engine("weights", path, "--cast", "layer=fp16", "--json") == 0
    found = {
        row["name"]: row["max_abs"] for row in json.loads(capsys.readouterr().out.split("bit for bit\n")[-1])["weights"]
    }
    for name in ("layer.transposed", "layer.sliced", "layer.double"):
        assert found[name] == pytest.approx(float((source[name].half().double() - source[name].double()).abs().max()))


@pytest.mark.parametrize("sharded", [False, True])
def test_folder_with_pickled_weights_is_exported_and_loaded_by_transformers(
    make_llama: Make, tmp_path: Path, sharded: bool
) -> None:
    """Through the command line and a live session, loaded back by transformers."""
    import transformers

    folder = make_llama("pickled", tie_word_embeddings=False)
    wanted = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(wanted)
    files = {"pytorch_model.bin": names}
    if sharded:
        files = {f"pytorch_model-0000{n}-of-00002.bin": names[n - 1 :: 2] for n in (1, 2)}
        index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for file, held in files.items():
        torch.save({name: wanted[name] for name in held}, folder / file)
    assert engine("export", folder, "--cast", "*.mlp=bf16", "-o", tmp_path / "cli") == 0
    session = de.open(str(folder))
    session.cast("*.mlp", "bfloat16")
    session.export(tmp_path / "live")
    for out in (tmp_path / "cli", tmp_path / "live"):
        found = load_file(out / "model.safetensors")
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert same_bits(found[name], tensor.bfloat16() if ".mlp." in name else tensor), name
        assert engine("verify", out, "--against", folder) == 0
        model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, wanted[name].bfloat16().float() if ".mlp." in name else wanted[name]), name


def test_verify_finds_errors_of_the_pickle_reader_that_export_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Verify reads the source with code of its own."""
    from dtype_engine.runtime.export import plan as contents

    torch.save({"a": torch.randn(4, 4), "b": torch.randn(3)}, tmp_path / "net.pth")
    right = contents.source_of
    monkeypatch.setattr(
        contents, "source_of", lambda checkpoint, name, how: PlainSource(right(checkpoint, name, how).read().flip(0))
    )
    assert engine("export", tmp_path / "net.pth", "--cast", "a=bf16", "-o", tmp_path / "out") == 0
    assert engine("verify", tmp_path / "out", "--against", tmp_path / "net.pth") == 1
    said = capsys.readouterr().out
    assert "values of a differ" in said
    assert "values of b differ" in said
    assert "not the same" in said


def shorter(name: str, data: bytes) -> bytes:
    return data[:-8] if "/data/" in name else data


def test_pickle_storage_shorter_than_its_tensor_is_refused(tmp_path: Path) -> None:
    for deflate in (True, False):
        path = tmp_path / "short.pth"
        torch.save({"weight": torch.randn(30)}, path)
        zipped_again(path, shorter, deflate)
        with pytest.raises(UserError, match=r"storage 0 should have 120 bytes and has 112: the file is damaged"):
            open_checkpoint(path)


def test_overlapping_or_missing_pickle_records_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    torch.save({"a": torch.zeros(100), "b": torch.ones(100)}, path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        first, second = (archive.getinfo(f"x/data/{key}").header_offset for key in "01")
    # The directory's entry of the second storage points to the first.
    at = whole.rindex(b"x/data/1") - 4
    assert int.from_bytes(whole[at : at + 4], "little") == second
    path.write_bytes(whole[:at] + first.to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(UserError, match="x/data/1 lies over x/data/0"):
        open_checkpoint(path)
    path.write_bytes(whole)
    with zipfile.ZipFile(path) as archive:
        records = {
            record.filename: archive.read(record) for record in archive.infolist() if "data/1" not in record.filename
        }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    with pytest.raises(UserError, match="storage 1 of its tensors is not in the archive"):
        open_checkpoint(path)


def test_pickle_archive_that_inflates_beyond_free_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    path = tmp_path / "bomb.pth"
    torch.save({"weight": torch.zeros(1_000_000)}, path)
    zipped_again(path)
    assert path.stat().st_size < 50_000
    free = psutil.virtual_memory()._replace(available=1_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(UserError, match=r"inflates to 3\.8\d MiB, and .* of memory are free"):
        open_checkpoint(path)


ODD: dict[str, tuple[Callable[[], torch.Tensor], int, str]] = {
    "coo": (lambda: torch.eye(3).to_sparse(), 3 * (2 * 8 + 4), "is sparse (sparse_coo)"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), 3 * (8 + 4) + 4 * 8, "is sparse (sparse_csr)"),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), 20, "is a nested tensor"),
    "meta": (lambda: torch.zeros(3, device="meta"), 0, "has no data"),
    "qint8": (
        lambda: torch.quantize_per_tensor(torch.ones(3, 4), 0.1, 0, torch.qint8),
        12,
        "is quantized by torch (qint8)",
    ),
    "bits8": (lambda: torch.zeros(5, dtype=torch.uint8).view(torch.bits8), 5, "is bits8"),
    "complex32": (lambda: torch.zeros(3, dtype=torch.complex32), 12, "is complex32"),
    "repeated": (
        lambda: torch.zeros(1).expand(1 << 20, 1 << 20),
        1 << 42,
        "repeats 4 B of its file until they are 4.00 TiB",
    ),
    "complex128": (lambda: torch.zeros(2, dtype=torch.complex128), 32, "is stored as complex128"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_tensors_that_safetensors_cannot_store_are_inspected_but_not_exported(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, nbytes, reason = ODD[kind]
    path = tmp_path / "odd.pth"
    torch.save({"plain.weight": torch.ones(4), f"odd.{kind}": make()}, path)
    trust: tuple[str, ...] = ()
    if not torch_loads(path):  # torch 2.15 no longer loads a nested tensor from a file that is not trusted
        assert engine("inspect", path) == 2
        assert "only with --trust-pickle" in capsys.readouterr().err
        trust = ("--trust-pickle",)
    assert engine("inspect", path, *trust, "--cast", "*=bf16", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["stored_bytes"] == 16 + nbytes
    assert shown["planned_bytes"] == 8 + nbytes
    assert engine("export", path, *trust, "--cast", "*=bf16", "-o", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert f"odd.pth: odd.{kind} {reason}" in said
    assert said.strip().count("\n") == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["odd.pth"]
    assert engine("weights", path, *trust, "--cast", "*=bf16") == 0


def torch_loads(path: Path) -> bool:
    """Return whether torch.load reads the file without running its code."""
    try:
        torch.load(path, weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def test_pickle_with_a_number_and_a_text_as_the_same_key_is_refused(tmp_path: Path) -> None:
    torch.save({1: torch.zeros(2), "1": torch.ones(2)}, tmp_path / "x.pth")
    with pytest.raises(UserError, match="two tensors whose names are both written '1'"):
        open_checkpoint(tmp_path / "x.pth")


class Tied(nn.Module):
    """A language model's usual tie."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weight_of_a_pickle_is_counted_and_exported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = Tied()
    torch.save(net.state_dict(), tmp_path / "net.pth")
    assert engine("inspect", tmp_path / "net.pth", "--cast", "head=bf16", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["stored_bytes"], shown["planned_bytes"]) == (160, 80)
    assert engine("export", tmp_path / "net.pth", "--cast", "head=bf16", "-o", tmp_path / "out") == 0
    assert "head.weight, which is embed.weight" in capsys.readouterr().err
    file = tmp_path / "out" / "model.safetensors"
    assert load_file(file).keys() == {"embed.weight"}
    assert engine("verify", tmp_path / "out", "--against", tmp_path / "net.pth") == 0
    # As safetensors' own save_model has it, and its load_model reads it.
    save_model(net, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    for written in (file, tmp_path / "theirs.safetensors"):
        with safe_open(written, framework="pt") as opened:
            kept = next(iter(opened.keys()))
            tied = {name for name in ("embed.weight", "head.weight") if name != kept}
            assert {name: opened.metadata()[name] for name in tied} == dict.fromkeys(tied, kept)
        checkpoint = open_checkpoint(written)
        assert set(checkpoint.weights) == {"embed.weight", "head.weight"}
        (tensor,) = checkpoint.tree().tensors.values()
        assert len(tensor.names) == 2
    back = Tied()
    assert load_model(back, file) == (set(), [])
    assert torch.equal(back.head.weight, net.head.weight.bfloat16().float())
    ours = Tied()
    de.load_pretrained(tmp_path / "out", module=ours)
    assert ours.head.weight is ours.embed.weight
    assert torch.equal(ours.head.weight.float(), back.head.weight)


def test_shared_storage_of_untied_weights_is_written_for_each_name(make_llama: Make, tmp_path: Path) -> None:
    """Two modules that hold the same storage in a pickle, and an architecture that has them apart."""
    import transformers

    folder = make_llama("shared", tie_word_embeddings=False)
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    held["lm_head.weight"] = held["model.embed_tokens.weight"]
    torch.save(held, folder / "pytorch_model.bin")
    assert engine("export", folder, "--cast", "lm_head=bf16", "-o", tmp_path / "out") == 0
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert torch.equal(model.lm_head.weight, held["lm_head.weight"].bfloat16().float())
    assert torch.equal(model.model.embed_tokens.weight, held["lm_head.weight"])
    assert engine("verify", tmp_path / "out", "--against", folder) == 0


def test_weights_tied_in_a_pickle_are_one_tensor_in_a_module_of_user_code(tmp_path: Path) -> None:
    """`--weights` with a pickle, which has both names, and with an export of it, which has one."""
    code = tmp_path / "net.py"
    code.write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.embed = nn.Embedding(10, 4)\n        self.head = nn.Linear(4, 10, bias=False)\n"
        "        self.head.weight = self.embed.weight\n"
    )
    net = Tied()
    torch.save(net.state_dict(), tmp_path / "net.pth")
    assert engine("export", tmp_path / "net.pth", "-o", tmp_path / "out") == 0
    torch.save({"embed.weight": torch.zeros(10, 4), "head.weight": torch.ones(10, 4)}, tmp_path / "apart.pth")
    for file in (tmp_path / "net.pth", tmp_path / "out" / "model.safetensors"):
        model = de.open(f"{code}:Net", options=de.Options(weights=file)).model
        assert model.module.head.weight is model.module.embed.weight  # type: ignore[union-attr]
        assert torch.equal(model.module.state_dict()["head.weight"], net.head.weight)
        assert model.tree.stored_bytes == 160
        assert model.notices == ()
    model = de.open(f"{code}:Net", options=de.Options(weights=tmp_path / "apart.pth")).model
    assert model.tree.stored_bytes == 320
    assert "has different values for them" in model.notices[0]


def test_export_of_a_pickle_gives_notices_about_other_entries_and_uncast_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"weight": torch.zeros(2), "steps": torch.tensor(3), "wave": torch.zeros(2, dtype=torch.complex64)}
    torch.save({"model": state, "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}}}, tmp_path / "x.pth")
    assert engine("export", tmp_path / "x.pth", "--cast", "*=bf16", "-o", tmp_path / "out", "--json") == 0
    assert json.loads(capsys.readouterr().out)["notices"] == [
        "x.pth: the weights are its entry 'model'",
        "x.pth: 1 other tensor in it is not among the weights, first optimizer.state.0.exp_avg",
        "kept as stored, whatever the rules say: 2 tensors, first steps: is stored as int64, which is never cast",
    ]


def test_compressed_pickle_archive_is_read_but_not_run(make_llama: Make) -> None:
    """transformers maps every archive: what it would compute is not of these weights."""
    folder = make_llama("packed")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    zipped_again(folder / "pytorch_model.bin")
    assert len(open_checkpoint(folder).weights) == 20
    with pytest.raises(UserError, match="compressed archive"):
        de.open(str(folder))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("share", [0.5, 0.99])
def test_truncated_pickle_archive_is_refused_as_cut_short(zipped: bool, share: float, tmp_path: Path) -> None:
    path = tmp_path / "half.pt"
    torch.save({"x": torch.randn(64, 64)}, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    for read in (open_checkpoint, read_tensors):
        with pytest.raises(UserError, match=r"half\.pt is cut short: "):
            read(path)


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("kept", [2, 14, 40, 200])
def test_file_that_ends_inside_its_pickle_is_refused_as_cut_short(kept: int, trust: bool, tmp_path: Path) -> None:
    """After 14 bytes the first pickle of torch's old format, its magic number, is nearly over; a bare one is a pickle alone."""
    torch.save({"x": torch.randn(64, 64)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "bare.pt").write_bytes(pickle.dumps({"x": list(range(500))}))
    for path in (tmp_path / "old.pt", tmp_path / "bare.pt"):
        path.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(UserError, match=rf"{path.name} is cut short: it ends in the middle of its pickle"):
            open_checkpoint(path, trust)
