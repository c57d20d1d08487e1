"""GGUF's blocks against the gguf package's own dequantizer: cast, measured, exported; and layouts that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.helpers.exporting import engine
from tests.helpers.gguf_files import write_model
from tests.helpers.recorded_worker import RecordedWorker

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.source import locate
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import RunSettings
from dtype_engine.runtime.measure.weight_errors import inspect_weight
from dtype_engine.service import events
from dtype_engine.service.commands import SetRecipe
from dtype_engine.service.jobs import VALUES, InspectTensor
from dtype_engine.service.open_model import OpenModel
from dtype_engine.service.save_requests import ExportRequest
from dtype_engine.service.writer import SaveContext, plan_export

Kind = gguf.GGMLQuantizationType
DEQUANTIZED = [
    Kind.Q8_0, Kind.Q4_0, Kind.Q5_1, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS, Kind.IQ2_S, Kind.TQ1_0,
    Kind.MXFP4,
]  # fmt: skip


NORM = np.linspace(-1, 1, 32, dtype=np.float32)


def blocks_of(kind: Kind, rows: int = 3, values: int = 512) -> np.ndarray[Any, Any]:
    """Rows of random blocks whose scales are finite: no half precision number has all the bits of its exponent set."""
    size, width = gguf.GGML_QUANT_SIZES[kind]
    return np.random.default_rng(0).integers(0, 256, (rows, values // size * width), dtype=np.uint8) & 0x3F


def write(path: Path, blocks: dict[str, tuple[Kind, np.ndarray[Any, Any]]], **settings: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama", **settings)
    writer.add_tensor("output_norm.weight", NORM)
    for name, (kind, raw) in blocks.items():
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_command_measures_casts_of_gguf_blocks_from_their_dequantized_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {f"blk.{n}.{kind.name.lower()}.weight": (kind, blocks_of(kind)) for n, kind in enumerate(DEQUANTIZED)}
    path = write(tmp_path / "x.gguf", made)
    wanted = {name: torch.from_numpy(gguf.quants.dequantize(raw, kind)) for name, (kind, raw) in made.items()}
    assert all(bool(torch.isfinite(tensor).all()) for tensor in wanted.values())
    stored = 32 * 4 + sum(raw.nbytes for _, raw in made.values())
    planned = 32 * 4 + sum(2 * tensor.numel() for tensor in wanted.values())
    assert engine("inspect", path, "--cast", "blk=bf16", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["stored_bytes"], shown["planned_bytes"]) == (stored, planned)
    assert engine("export", path, "--cast", "blk=bf16", "-o", tmp_path / "out", "--json") == 0
    assert json.loads(capsys.readouterr().out)["nbytes"] == planned
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found.pop("output_norm.weight"), torch.from_numpy(NORM))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor.bfloat16()), name
    assert engine("verify", tmp_path / "out", "--against", path) == 0
    assert "the gguf package dequantized the blocks" in capsys.readouterr().out
    assert engine("weights", path, "--cast", "blk=bf16", "--json") == 0
    errors = {row["name"]: row for row in json.loads(capsys.readouterr().out)["weights"]}
    for name, tensor in wanted.items():
        difference = (tensor.bfloat16().double() - tensor.double()).abs()
        assert errors[name]["max_abs"] == pytest.approx(float(difference.max()), rel=1e-6)
        assert errors[name]["stored"] == f"gguf:{made[name][0].name.lower()}"
    # What the app asks for with v.
    name, tensor = next(iter(wanted.items()))
    reading = inspect_weight(open_checkpoint(path), name, ("float16", "int8"))
    counts = torch.frexp(tensor[tensor != 0]).exponent.sub(1).unique(return_counts=True)
    assert reading.exponents.counts == tuple(zip(counts[0].tolist(), counts[1].tolist(), strict=True))
    assert [error.stored for error in reading.errors] == ["gguf:q8_0", "gguf:q8_0"]


def test_gguf_blocks_are_exported_in_formats_with_scales(tmp_path: Path) -> None:
    raw = blocks_of(Kind.Q8_0)
    path = write(tmp_path / "x.gguf", {"blk.0.weight": (Kind.Q8_0, raw)})
    assert engine("export", path, "--cast", "blk=int8", "-o", tmp_path / "out") == 0
    values = torch.from_numpy(gguf.quants.dequantize(raw, Kind.Q8_0))
    found = load_file(tmp_path / "out" / "model.safetensors")
    scale = values.abs().amax(dim=1) / 127
    assert torch.equal(found["blk.0.weight_scale"].reshape(-1), scale)
    assert torch.equal(found["blk.0.weight_quantized"], (values / scale[:, None]).round().to(torch.int8))
    assert engine("verify", tmp_path / "out", "--against", path) == 0


FAMILIES = {"llama": "Llama", "gemma": "Gemma", "qwen2moe": "Qwen2Moe"}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_gguf_without_blocks_is_exported_without_a_rule_in_its_own_dtypes(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    """llama.cpp has the rows of queries, Gemma's norms, experts and a gate in another form than transformers."""
    model_class = getattr(transformers, f"{FAMILIES[architecture]}ForCausalLM")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
             "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "pad_token_id": None}  # fmt: skip
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes)).eval()

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(16)
        if architecture == "qwen2moe":
            writer.add_expert_count(4)
            writer.add_expert_used_count(2)
            writer.add_expert_feed_forward_length(48)
            writer.add_expert_shared_feed_forward_length(48)

    write_model(tmp_path / "x.gguf", architecture, model, add, kind=kind)
    stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    assert engine("export", tmp_path / "x.gguf", "-o", tmp_path / "out") == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    norms = {name: tensor.dtype for name, tensor in tensors.items() if tensor.ndim == 1}
    assert set(norms.values()) == {torch.float32}
    assert {tensor.dtype for name, tensor in tensors.items() if name.endswith("_proj.weight")} == {stored}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    found = loaded.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(found[name], tensor, rtol=2**-8, atol=1e-7), name
    assert engine("verify", tmp_path / "out", "--against", tmp_path / "x.gguf") == 0


def test_export_refuses_gguf_blocks_that_no_rule_casts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "x.gguf", {"blk.0.weight": (Kind.Q4_K, blocks_of(Kind.Q4_K))})
    sentence = "x.gguf: blk.0.weight is stored as gguf:q4_k, which safetensors can't hold; give it a dtype to be dequantized to"
    for arguments in ((), ("--cast", "output_norm=bf16")):
        assert engine("export", path, *arguments, "-o", tmp_path / "out") == 2
        said = capsys.readouterr().err
        assert sentence in said
        assert "Traceback" not in said
    source = locate(str(path))
    context = SaveContext(OpenModel(source, de.Options(), source.open()), RunSettings(), Recipe())
    with pytest.raises(UserError, match="is stored as gguf:q4_k"):
        plan_export(context)  # what the app's dialog asks for
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.gguf"]


def test_gguf_blocks_without_a_decoder_are_inspected_but_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = blocks_of(Kind.Q8_K)
    path = write(tmp_path / "x.gguf", {"blk.0.weight": (Kind.Q8_K, raw)})
    with pytest.raises(NotImplementedError):
        gguf.quants.dequantize(raw, Kind.Q8_K)
    assert open_checkpoint(path).tree().tensors["blk.0.weight"].nbytes == raw.nbytes
    assert engine("export", path, "--cast", "*=bf16", "-o", tmp_path / "out") == 2
    assert "blk.0.weight is stored as q8_k, which the gguf package can't dequantize" in capsys.readouterr().err
    assert engine("weights", path, "--cast", "*=bf16") == 0
    assert "left out   1 tensor, first blk.0.weight: is stored as q8_k" in capsys.readouterr().out
    with pytest.raises(UserError, match="can't dequantize"):
        inspect_weight(open_checkpoint(path), "blk.0.weight", ("float16",))


def test_big_endian_gguf_is_inspected_but_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "x.gguf", {}, endianess=gguf.GGUFEndian.BIG)
    assert engine("inspect", path) == 0
    assert engine("export", path, "--cast", "*=bf16", "-o", tmp_path / "out") == 2
    assert engine("export", path, "-o", tmp_path / "out") == 2
    assert "big-endian" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("offset", "says"),
    [
        (0, "overlaps another"),
        (64, "overlaps another"),
        (2**64 - 96, "lie outside the file's data"),
        (2**40, "GGUF|outside"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_gguf_tensors_that_overlap_or_exceed_the_file_are_refused(tmp_path: Path, offset: int, says: str) -> None:
    path = write(tmp_path / "x.gguf", {"blk.0.weight": (Kind.Q8_0, blocks_of(Kind.Q8_0))})
    whole = path.read_bytes()
    # After a tensor's name: the number of dimensions, two extents, its type, and where it begins.
    at = whole.index(b"blk.0.weight") + len("blk.0.weight") + 4 + 2 * 8 + 4
    assert int.from_bytes(whole[at : at + 8], "little") == 128
    path.write_bytes(whole[:at] + offset.to_bytes(8, "little") + whole[at + 8 :])
    with pytest.raises(UserError, match=says):
        open_checkpoint(path)


def test_app_shows_and_exports_gguf_blocks(tmp_path: Path) -> None:
    """Its dialog of an export, with and without a rule for them, the values of a tensor, and the export itself."""
    raw = blocks_of(Kind.Q8_0)
    path = write(tmp_path / "x.gguf", {"blk.0.weight": (Kind.Q8_0, raw)})
    with RecordedWorker(str(path), de.Options(device="cpu"), read_headers=True) as recorded:
        worker, wait = recorded.worker, recorded.wait_for
        wait(events.OpenFailed)  # no forward pass: everything but that works
        worker.plan_export()
        assert "is stored as gguf:q8_0" in str(wait(events.ExportPlanned))
        worker.request(SetRecipe(Recipe((Rule("*", "bfloat16"),))))
        worker.plan_export()
        assert wait(events.ExportPlanned, lambda event: event.plan is not None).plan.nbytes == 2 * (32 + 3 * 512)
        worker.request(VALUES.ask(InspectTensor("blk.0.weight", ("bfloat16",))))
        assert recorded.answer(VALUES).errors[0].stored == "gguf:q8_0"
        worker.save(ExportRequest(tmp_path / "out"))
        assert wait(events.Saved).done
        assert not recorded.of(events.Failed)
    found = load_file(tmp_path / "out" / "model.safetensors")["blk.0.weight"]
    assert torch.equal(found, torch.from_numpy(gguf.quants.dequantize(raw, Kind.Q8_0)).bfloat16())
