"""An export holds what the recipe makes of the source, bit for bit, and loads back so; and a failed one leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from safetensors.torch import load_file
from tests.engine.runtime.export.test_experts import saved
from tests.helpers import formats, preloaded
from tests.helpers.exporting import export_checkpoint, read, same_bits
from tests.helpers.measured_on import placed
from tests.helpers.paths import TINYNET
from torch import nn

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.schemes import CODES
from dtype_engine.cli import cli, run
from dtype_engine.core import dtypes
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.runtime.export import of_checkpoint
from dtype_engine.runtime.export.write import header
from dtype_engine.runtime.formats.dequantize import dequantize, torch_dtype
from dtype_engine.runtime.modes.candidate import candidate_value
from dtype_engine.runtime.numerics.quantize import cast_or_quantize


def recipe(*casts: str) -> Recipe:
    return Recipe(tuple(Rule.parse(cast) for cast in casts))


def export(source: Path, target: Path, *casts: str, **rest: Any) -> Any:
    return export_checkpoint(open_checkpoint(source), source.name, recipe(*casts), target, **rest)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, read by the safetensors library itself."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", ["1GB", "8KB"])
def test_every_exported_tensor_equals_the_cast_of_its_source_tensor(
    make_llama: Any, tmp_path: Path, tied: bool, shard: str
) -> None:
    source = make_llama(dtype="bfloat16", tie_word_embeddings=tied, max_shard_size=shard)
    report = export(source, tmp_path / "out", "*.mlp=float16", "type:LlamaRMSNorm=float32", max_shard_size=shard)
    before, after = stored(source), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        wanted = torch.float16 if ".mlp." in name else torch.float32 if "norm" in name else torch.bfloat16
        assert same_bits(after[name], tensor.to(wanted)), name
    assert (len(report.files) > 1) == (shard == "8KB")
    assert ("lm_head.weight" in after) != tied
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float32"  # float16 and bfloat16 fit in nothing smaller
    assert "quantization_config" not in config


@pytest.mark.parametrize("shard", ["5GB", "8KB"])
def test_load_pretrained_memory_maps_every_weight_in_its_exported_dtype(
    make_llama: Any, tmp_path: Path, shard: str
) -> None:
    source = make_llama(dtype="float32")
    out = tmp_path / "out"
    export(source, out, "*.mlp=float16", "*.self_attn=bfloat16", "model.layers.1.mlp=stored", max_shard_size=shard)
    model = de.load_pretrained(out)
    after = stored(out)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert type(model) is __import__("transformers").LlamaForCausalLM
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16, torch.bfloat16, torch.float32}
    for name, parameter in model.named_parameters():
        assert same_bits(parameter.data, after[name]), name
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr, union-attr]
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_export_keeps_the_dtypes_of_a_mixed_source(make_llama: Any, tmp_path: Path) -> None:
    source = make_llama(dtype="float32", dtypes={"mlp": "float16", "norm": "bfloat16", "q_proj": "float64"})
    export(source, tmp_path / "out", "*.k_proj=float16")
    before, after = stored(source), stored(tmp_path / "out")
    for name, tensor in before.items():
        assert same_bits(after[name], tensor.half() if "k_proj" in name else tensor), name
    for name, parameter in de.load_pretrained(tmp_path / "out").named_parameters():
        assert same_bits(parameter.data, after[name]), name


def test_export_stores_scaled_linear_weights_as_compressed_tensors(make_llama: Any, tmp_path: Path) -> None:
    source = make_llama(dtype="bfloat16", tie_word_embeddings=False)
    out = tmp_path / "out"
    report = export(source, out, "*.mlp=fp8", "*.o_proj=int8@tensor")
    before, after = stored(source), stored(out)
    for name, tensor in before.items():
        label = "float8_e4m3fn" if ".mlp." in name else "int8@tensor" if "o_proj" in name else None
        if label is None:
            assert same_bits(after[name], tensor)
            continue
        data, scale = cast_or_quantize(tensor, label)
        assert scale is not None
        assert same_bits(after[name], data)
        found = after[f"{name}_scale"]
        assert list(found.shape) == ([1] if "@" in label else [len(tensor), 1])
        assert torch.equal(found.reshape(-1), scale)
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    groups = config["quantization_config"]["config_groups"].values()
    assert {name for group in groups for name in group["targets"]} == {
        f"model.layers.{layer}.{name}"
        for layer in range(2)
        for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj")
    }
    assert "lm_head" in config["quantization_config"]["ignore"]
    assert report.notices == ()


@pytest.mark.parametrize("base", ["float32", "bfloat16"])
def test_transformers_loads_exported_scaled_weights(make_llama: Any, tmp_path: Path, base: str) -> None:
    pytest.importorskip("compressed_tensors")
    import transformers

    source = make_llama(dtype=base)
    out = tmp_path / "out"
    export(source, out, "*.mlp=fp8", "*.{q,k}_proj=int8", "*.o_proj=fp8@tensor")
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.LlamaForCausalLM.from_pretrained(out, quantization_config=settings)
    ours = de.load_pretrained(out)
    more = theirs.state_dict().keys() - ours.state_dict().keys()
    assert all(name.endswith(("_scale", "_zero_point")) for name in more)  # an older transformers keeps the scales
    files = stored(out)
    for name, tensor in ours.state_dict().items():
        read = theirs.state_dict()[name]
        if same_bits(read, tensor):
            continue
        # Older ones (0.15 does) round the scale to the model's dtype before they multiply: the file is the same, the last bit not.
        assert Version(version("compressed_tensors")) < Version("0.20"), name
        assert same_bits(read, files[name].to(tensor.dtype) * files[f"{name}_scale"].to(tensor.dtype)), name


def test_exported_weights_that_only_dtype_engine_reads_have_a_name_that_ends_in_quantized(
    make_llama: Any, tmp_path: Path
) -> None:
    source = make_llama(dtype="bfloat16")
    out = tmp_path / "out"
    report = export(source, out, "model.embed_tokens=fp8", "*.o_proj=e5m2", "*norm*=int8")
    names = stored(out)
    assert "model.embed_tokens.weight_quantized" in names
    assert "model.embed_tokens.weight" not in names
    assert any("only dtype-engine reads" in notice for notice in report.notices)
    assert "can't load it" in (out / "README.md").read_text()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    session = de.open(str(out))
    assert session.tree.tensors["model.embed_tokens.weight"].dtype == "float8_e4m3fn"
    assert session.tree.tensors["model.norm.weight"].dtype == "int8"


def test_opened_export_has_the_weights_of_the_candidate_that_was_exported(make_llama: Any, tmp_path: Path) -> None:
    source = make_llama(dtype="bfloat16")
    session = de.open(str(source))
    for cast in ("*.mlp=fp8", "*.o_proj=int8@tensor", "*norm*=float32", "model.embed_tokens=fp8", "*.q_proj=e5m2"):
        session.cast(*cast.split("="))
    report = session.export(tmp_path / "out")
    assert report.nbytes == session.plan.planned_bytes
    opened = de.open(str(tmp_path / "out"))
    assert {n: t.dtype for n, t in opened.tree.tensors.items()} == dict(session.plan.dtypes)
    assert opened.plan.stored_bytes == session.plan.planned_bytes
    assert opened.model.resident_bytes == session.model.resident_bytes
    for name, weight in session.model.weights.items():
        other = opened.model.weights[name]
        assert weight.has_scales == other.has_scales
        assert same_bits(candidate_value(weight, torch.float32), candidate_value(other, torch.float32)), name
    drift = opened.drift().output
    assert drift.nonfinite == 0
    assert drift.rel_l2 < 0.02  # from float32 arithmetic on the very same values; a scale forgotten would give over 1


def test_export_of_an_export_copies_scaled_weights_unchanged(make_llama: Any, tmp_path: Path) -> None:
    source = make_llama(dtype="bfloat16")
    export(source, tmp_path / "one", "*.mlp=fp8", "*.v_proj=e5m2")
    export(tmp_path / "one", tmp_path / "two", "*.q_proj=float16")
    one, two = stored(tmp_path / "one"), stored(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert same_bits(two[name], tensor.half() if "q_proj" in name else tensor), name
    assert open_checkpoint(tmp_path / "two").coded.keys() == open_checkpoint(tmp_path / "one").coded.keys()
    groups = json.loads((tmp_path / "two" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert len(groups["group_0"]["targets"]) == 6


def test_load_pretrained_dequantizes_scaled_weights_to_the_config_dtype(make_llama: Any, tmp_path: Path) -> None:
    source = make_llama(dtype="bfloat16")
    export(source, tmp_path / "out", "*.mlp=fp8", "*.v_proj=e5m2@tensor")
    model = de.load_pretrained(tmp_path / "out")
    for name, tensor in stored(source).items():
        label = "float8_e4m3fn" if "mlp" in name else "float8_e5m2@tensor" if "v_proj" in name else None
        if label is not None:
            data, scale = cast_or_quantize(tensor, label)
            assert scale is not None
            tensor = dequantize(data, scale, torch.bfloat16)
        assert same_bits(model.state_dict()[name], tensor), name


TARGETS = st.sampled_from(
    [
        *dtypes.COMPUTE_DTYPES,
        *(name for name in formats.WHOLE if dtypes.BY_NAME[name].scales != "fused"),  # whose scale is not of one tensor
        dtypes.STORED,
    ]
)
PATTERNS = st.sampled_from(
    [
        "*",
        "*.mlp",
        "*.self_attn",
        "*norm*",
        "type:Linear",
        "model.layers.0",
        "*.{q,k}_proj",
        "lm_head",
        "model.embed_tokens",
    ]
)


@pytest.fixture(scope="module")
def sources() -> Any:
    """Make two small checkpoints: one tied in bfloat16, and one untied with several dtypes in two shards."""
    import transformers

    folder = Path(tempfile.mkdtemp())
    small = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    for tied in (True, False):
        torch.manual_seed(1)
        config = transformers.LlamaConfig(**small, **heads, tie_word_embeddings=tied)
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16 if tied else torch.float32)
        if not tied:
            model.model.layers[0].half()
        model.save_pretrained(folder / str(tied), max_shard_size="1GB" if tied else "6KB")
    yield folder
    shutil.rmtree(folder)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rules=st.lists(st.tuples(PATTERNS, TARGETS), max_size=4), tied=st.booleans(), shard=st.sampled_from([3000, 10**9])
)
def test_exported_dtypes_and_bytes_equal_the_plan_for_any_recipe(
    sources: Path, rules: Any, tied: bool, shard: int
) -> None:
    source = open_checkpoint(sources / str(tied))
    wanted = Recipe(tuple(Rule.make(pattern, dtype) for pattern, dtype in rules))
    target = Path(tempfile.mkdtemp()) / "out"
    report = export_checkpoint(source, "source", wanted, target, max_shard_size=shard)
    exported = open_checkpoint(target)
    before = stored(sources / str(tied))
    contents = of_checkpoint(source, "source", wanted)
    # Bytes on disk without headers are the plan's.
    on_disk = 0
    for file in target.glob("*.safetensors"):
        with open(file, "rb") as opened:
            on_disk += file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")
    assert on_disk == report.nbytes == sum(dtypes.nbytes_in(item.shape, item.dtype) for item in contents.items)
    assert exported.weights.keys() == before.keys()
    after = stored(target)
    for item in contents.items:
        assert exported.dtype(item.name) == item.dtype
        data, scale = (
            (before[item.name], None) if item.dtype == item.stored else cast_or_quantize(before[item.name], item.dtype)
        )
        name = exported.coded[item.name].parts[CODES].name if item.has_scales else item.name
        assert same_bits(after[name], data), item.name
        if scale is not None:
            assert torch.equal(after[f"{item.name}_scale"].reshape(-1), scale)
    shutil.rmtree(target.parent)


def test_export_copies_other_files_but_no_symlinks_out_of_the_folder(make_llama: Any, tmp_path: Path) -> None:
    source = make_llama()
    (tmp_path / "secret").write_text("not yours")
    (source / "tokenizer.json").write_text("{}")
    (source / "merges.txt").symlink_to(tmp_path / "secret")
    (source / "vocab.txt").mkdir()
    (source / "notes.md").write_text("mine")
    os.mkfifo(source / "special_tokens_map.json")
    report = export(source, tmp_path / "out")
    names = {entry.name for entry in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "recipe.yaml", "README.md", "tokenizer.json",
    }  # fmt: skip
    assert sum("not copied" in notice for notice in report.notices) == 3
    assert not any(entry.is_symlink() for entry in (tmp_path / "out").iterdir())


def test_export_of_a_hub_snapshot_copies_files_behind_symlinks(make_llama: Any, tmp_path: Path) -> None:
    source = make_llama()
    (source / "tokenizer.json").write_text("{}")
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abcdef1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, entry in enumerate(sorted(source.iterdir())):
        shutil.copy(entry, blobs / str(number))
        (snapshot / entry.name).symlink_to(Path("../../blobs") / str(number))
    export(snapshot, tmp_path / "out", "*=float16")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    assert stored(tmp_path / "out")["model.norm.weight"].dtype == torch.float16


@pytest.mark.parametrize("at", [0, 1, 5, 1_000_000])
def test_cancelled_export_leaves_no_files(make_llama: Any, tmp_path: Path, at: int) -> None:
    source = make_llama()
    place = tmp_path / "place"
    place.mkdir()
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > at

    if at == 1_000_000:
        export(source, place / "out", "*=float16", cancelled=cancelled)
        assert [entry.name for entry in place.iterdir()] == ["out"]
        return
    with pytest.raises(Cancelled):
        export(source, place / "out", "*=float16", cancelled=cancelled)
    assert list(place.iterdir()) == []


def test_export_progress_counts_every_byte_once(make_llama: Any, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    report = export(
        make_llama(), tmp_path / "out", "*.mlp=fp8", "*.q_proj=half", on_bytes=lambda *heard: told.append(heard)
    )
    assert told[0] == (0, report.nbytes)
    assert told[-1] == (report.nbytes, report.nbytes)
    assert told == sorted(told)


def test_export_does_not_overwrite_a_nonempty_folder(make_llama: Any, tmp_path: Path) -> None:
    source = make_llama()
    before = {entry.name: entry.read_bytes() for entry in source.iterdir()}
    with pytest.raises(UserError, match="is not empty"):
        export(source, source, "*=float16")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is no folder"):
        export(source, tmp_path / "file")
    with pytest.raises(UserError, match="there is no folder"):
        export(source, tmp_path / "none" / "out")
    (tmp_path / "empty").mkdir()
    export(source, tmp_path / "empty")
    assert {entry.name: entry.read_bytes() for entry in source.iterdir()} == before


def test_too_little_disk_space_is_reported_before_writing(
    make_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_llama()
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"needs 1\.\d\d MiB and 1 B are free"):
        export(source, place / "out")
    assert list(place.iterdir()) == []


HALTING = """
import os, signal, sys, threading, time
from dtype_engine.runtime.export import write
from dtype_engine.cli import cli, run
told = os.dup(1)  # a command prints its answers alone there
def wait(tensor, dtype, out, *more):
    os.write(told, b"writing\\n")
    if number := int(sys.argv[1]):
        time.sleep(0.5)  # the main thread waits by then
        signal.pthread_kill(threading.get_ident(), number)
    while True: time.sleep(0.05); out.progress.wrote(0)
write._write_tensor = wait
sys.exit(run(cli, "dtype-engine", sys.argv[2:]))
"""
"""A program that exports as its later arguments say, and halts when it writes the first tensor. Its first argument is the signal
that the writing thread is sent there, or 0.
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGINT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGXCPU,
        signal.SIGALRM,
        signal.SIGVTALRM,
        signal.SIGPROF,
    ],
    ids=lambda number: number.name,
)
def test_killed_export_leaves_no_target_folder(make_llama: Any, tmp_path: Path, number: int) -> None:
    source = make_llama()
    before = {entry.name: entry.read_bytes() for entry in source.iterdir()}
    place = tmp_path / "place"
    place.mkdir()
    program = preloaded.Program(HALTING, "0", "export", str(source), "--cast", "*=float16", "-o", str(place / "out"))
    assert program.stdout.readline() == "writing\n"
    assert [entry.name.startswith(".out.partial-") for entry in place.iterdir()] == [True]
    program.send_signal(number)
    done = program.result()
    assert not (place / "out").exists()
    assert {entry.name: entry.read_bytes() for entry in source.iterdir()} == before
    if number != signal.SIGKILL:
        by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
        assert done.stderr.splitlines()[-1] == f"dtype-engine: interrupted{by}"
        assert done.returncode == 128 + number
        assert list(place.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_that_another_thread_receives_ends_an_export(make_llama: Any, tmp_path: Path, number: int) -> None:
    """A signal that the system delivers to another thread, or just before the main thread waits, wakes no thread."""
    place = tmp_path / "place"
    place.mkdir()
    done = preloaded.run(
        HALTING, str(int(number)), "export", str(make_llama()), "--cast", "*=float16", "-o", str(place / "out")
    )
    assert done.returncode == 128 + number, done.stderr
    assert list(place.iterdir()) == []


def test_module_without_a_checkpoint_is_exported_and_loaded_back(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.norm = nn.BatchNorm1d(4)
            self.conv = nn.Conv1d(4, 6, 3)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("table", torch.arange(4.0), persistent=False)
            self.register_buffer("empty", torch.zeros(0, 3))
            self.register_buffer("mask", torch.ones(4, dtype=torch.bool))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.embed(ids) + self.table))

    torch.manual_seed(3)
    session = de.open(Tied(), inputs=(torch.tensor([1, 2, 3]),))
    session.cast("norm", "float16")
    session.cast("conv", "fp8")
    report = session.export(tmp_path / "out")
    assert report.nbytes == session.plan.planned_bytes
    names = stored(tmp_path / "out").keys()
    assert "table" not in names
    assert "head.weight" not in names  # tied: stored once
    said = "\n".join(report.notices)
    assert "first head.weight, which is embed.weight" in said
    assert "2 weights, first conv.weight, are stored with scales in a layout that only dtype-engine reads" in said
    back = Tied()
    assert de.load_pretrained(tmp_path / "out", module=back) is back
    assert back.head.weight is back.embed.weight
    for name, tensor in session.model.weights.items():
        if tensor.info.persistent:
            ours = back.state_dict()[name]
            wanted = tensor.tensor.data
            if tensor.scale is not None:
                wanted = dequantize(wanted, tensor.scale, torch.float32)
            assert same_bits(ours, wanted), name
    with pytest.raises(UserError, match="is not in this model"):
        de.load_pretrained(tmp_path / "out", module=nn.Linear(2, 2))


def test_python_model_is_exported_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["export", f"{TINYNET}:TinyNet", "--cast", "linear_1=bf16", "-o", str(out), "--json"]
    assert run(cli, "dtype-engine", arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["dtypes"]["bfloat16"] == {"tensors": 2, "nbytes": 12}
    assert stored(out)["linear_1.weight"].dtype == torch.bfloat16
    assert not (out / "config.json").exists()


def test_packed_experts_are_exported_in_their_planned_dtype(tmp_path: Path) -> None:
    before = stored(saved("mixtral", tmp_path / "moe", width=24, count=3))
    session = de.open(str(tmp_path / "moe"))
    session.cast("*.experts.down_proj", "float16")
    session.export(tmp_path / "out")
    after = stored(tmp_path / "out")
    changed = {name for name in before if after[name].dtype == torch.float16}
    assert changed == {name for name in before if ".w2." in name}
    assert all(same_bits(after[name], before[name].half()) for name in changed)
    back = dict(de.load_pretrained(tmp_path / "out").named_parameters())
    for name, weight in session.model.weights.items():
        if weight.info.persistent:
            assert same_bits(back[name].data, weight.tensor.data), name


def test_export_rule_without_matches_is_refused(make_llama: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="matches nothing"):
        export(make_llama(), tmp_path / "out", "*.nothing=float16")
    assert not (tmp_path / "out").exists()


def test_scales_that_do_not_fit_their_weight_are_refused(make_llama: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    export(make_llama(tie_word_embeddings=False), tmp_path / "out", "lm_head=fp8")
    file = tmp_path / "out" / "model.safetensors"
    tensors, metadata = read(file)
    tensors["lm_head.weight_scale"] = tensors["lm_head.weight_scale"][:-1].clone()
    save_file(tensors, file, metadata)
    with pytest.raises(UserError, match="are not those of a weight"):
        de.open(str(tmp_path / "out"))


def test_tensors_in_written_files_are_aligned(make_llama: Any, tmp_path: Path) -> None:
    contents = of_checkpoint(
        open_checkpoint(make_llama(vocab_size=63, intermediate_size=47)), "m", recipe("*.mlp=fp8", "*.q_proj=half")
    )
    entries = [entry for item in contents.items for entry in item.entries]
    head, starts = header(entries, {"format": "pt"})
    assert len(head) % 8 == 0
    for entry in entries:
        assert starts[entry.name] % torch_dtype(entry.dtype).itemsize == 0


def test_export_memory_does_not_grow_with_tensor_size(tmp_path: Path) -> None:
    """Anonymous memory while 128 MiB are cast and 64 copied, in a process of its own, so that nothing else counts: pieces, of which
    the C library keeps what was freed, however large a tensor is. One tensor as a whole would be too much.
    """
    done = preloaded.run(preloaded.module("tests.helpers.export_memory"), str(tmp_path))
    grown, scaled, tensor = map(int, done.stdout.split())
    assert max(grown, scaled) < tensor


@pytest.mark.parametrize("rules", [("*.mlp=bfloat16",), ("*=bfloat16", "*norm=float32", "lm_head=float16")])
def test_load_pretrained_of_a_mixed_export_gives_the_measured_drift(
    make_llama: Any, tmp_path: Path, rules: tuple[str, ...]
) -> None:
    import transformers

    source = make_llama(dtype="float32")
    ids = placed(torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(0)))
    session = de.open(str(source), inputs={"input_ids": ids})
    session.apply(Recipe(tuple(map(Rule.parse, rules))))
    measured = session.drift().output
    session.export(tmp_path / "out")
    model = placed(de.load_pretrained(tmp_path / "out"))
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="dtype"):
            model(ids)
        with de.mixed_dtypes():
            logits = model(ids).logits
        wanted = placed(transformers.AutoModelForCausalLM.from_pretrained(source))(ids).logits
    drift = (logits.cpu().double() - wanted.cpu().double()).abs()
    assert measured.max_abs == pytest.approx(float(drift.max()), rel=1e-6)
    assert measured.mean_abs == pytest.approx(float(drift.mean()), rel=1e-6)
