"""Checkpoints that another program quantized, run, cast and exported: against plain transformers with weights decoded by numpy."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.helpers.exporting import export_checkpoint
from tests.helpers.file_edits import change_config
from tests.helpers.measured_on import placed
from torch.utils._python_dispatch import TorchDispatchMode

import dtype_engine as de
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.runtime.formats import schemes

Make = Callable[[], transformers.PreTrainedModel]
BLOCK = 32
_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
FORMAT = f"fp8:e4m3@{BLOCK}x{BLOCK}"


def _llama() -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=80, **_SMALL))


def _qwen3_moe() -> transformers.PreTrainedModel:
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, head_dim=32, **_SMALL
        )
    )


MODELS = [pytest.param(_llama, id="llama"), pytest.param(_qwen3_moe, id="qwen3_moe")]


def _encoded(weight: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The codes of a weight in float8_e4m3fn, the scale of each block, and the float32 values that they give."""
    rows, columns = weight.shape
    scale = np.empty((-(-rows // BLOCK), -(-columns // BLOCK)), np.float32)
    codes, values = np.empty(weight.shape, ml_dtypes.float8_e4m3fn), np.empty(weight.shape, np.float32)
    for i, j in np.ndindex(scale.shape):
        block = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
        scale[i, j] = np.abs(weight[block]).max() / np.float32(448)
        codes[block] = (weight[block] / scale[i, j]).astype(ml_dtypes.float8_e4m3fn)
        values[block] = codes[block].astype(np.float32) * scale[i, j]
    return codes, scale, values


def quantised(make: Make, folder: Path) -> dict[str, torch.Tensor]:
    """Write a model with its linear layers in float8 with block scales. Returns the float32 values of all its weights."""
    torch.manual_seed(0)
    make().to(torch.bfloat16).save_pretrained(folder)
    tensors, values = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    for name, tensor in list(tensors.items()):
        values[name] = tensor.float()
        if name.endswith("_proj.weight"):
            codes, scale, decoded = _encoded(tensor.float().numpy())
            tensors[name] = torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"], values[name] = torch.from_numpy(scale), torch.from_numpy(decoded)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]})
    return values


def plain(folder: Path, values: dict[str, torch.Tensor], where: Path) -> tuple[transformers.PreTrainedModel, ...]:
    """Return the model in float32 and in bfloat16, as plain transformers loads these values."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    where.mkdir()
    (where / "config.json").write_text(json.dumps(config))
    save_file(values, where / "model.safetensors", {"format": "pt"})
    load = transformers.AutoModelForCausalLM.from_pretrained
    return tuple(load(where, dtype=dtype).eval() for dtype in (torch.float32, torch.bfloat16))


def _recipe(*rules: str) -> de.Recipe:
    return de.Recipe(tuple(map(de.Rule.parse, rules)))


def _session(folder: Path, tmp_path: Path) -> tuple[de.Session, torch.Tensor]:
    ids = torch.randint(3, 60, (2, 16), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    return de.open(str(folder), options=de.Options(tensors=tmp_path / "ids.safetensors")), ids


@pytest.mark.parametrize("make", MODELS)
def test_cast_of_fp8_blocks_starts_from_the_decoded_values(make: Make, tmp_path: Path) -> None:
    values = quantised(make, folder := tmp_path / "fp8")
    wide, narrow = plain(folder, values, tmp_path / "plain")
    session, ids = _session(folder, tmp_path)
    with torch.no_grad():
        r, c = (placed(model)(input_ids=ids).logits.cpu().double() for model in (wide, narrow))
    for rules in ([], ["*=bf16"], ["*=bf16", "model.norm=stored"]):
        session.apply(_recipe(*rules))
        output = session.drift().output
        assert output.mean_abs == pytest.approx(float((r - c).abs().mean()), rel=1e-6)
        assert output.sqnr_db == pytest.approx(20 * float((r.norm() / (r - c).norm()).log10()), rel=1e-6)
    session.apply(_recipe("*=f32"))
    assert session.drift().output.max_abs == 0


@pytest.mark.parametrize("make", MODELS)
def test_model_with_packed_weights_takes_only_their_packed_memory(make: Make, tmp_path: Path) -> None:
    quantised(make, folder := tmp_path / "fp8")
    session, _ = _session(folder, tmp_path)
    model = session.model
    packed = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    buffers = sum(buffer.nbytes for buffer in model.module.buffers())
    for _ in range(2):
        assert model.resident_bytes == packed + buffers
        held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.module.parameters()}
        decoded = [weight for weight in model.weights.values() if weight.decoded]
        assert decoded
        assert sum(weight.tensor.untyped_storage().nbytes() for weight in decoded) == 2 * len(decoded)
        assert sum(held.values()) < packed
        session.drift()  # which leaves nothing behind


@pytest.mark.parametrize("make", MODELS)
def test_decoded_values_are_freed_after_their_operation(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised(make, folder := tmp_path / "fp8")
    session, _ = _session(folder, tmp_path)
    decode, alive, most, count = schemes.decode, set[int](), 0, 0

    def counted(*given: Any) -> torch.Tensor:
        nonlocal most, count
        values = decode(*given)
        count += 1
        alive.add(count)
        weakref.finalize(values, alive.discard, count)
        most = max(most, len(alive))
        return values

    monkeypatch.setattr(schemes, "decode", counted)
    session.drift()
    assert count >= 2 * sum(weight.decoded for weight in session.model.weights.values())
    assert most <= 2
    assert not alive


class _Peak(TorchDispatchMode):
    """Counts the bytes of all storages that torch operations make, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.most = dict[int, int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in (result,) if isinstance(result, torch.Tensor) else result if isinstance(result, tuple) else ():
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()).data_ptr() not in self.held:
                self.held[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage.data_ptr(), None)
        self.most = max(self.most, sum(self.held.values()))
        return result


def _wide() -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**_SMALL, "num_hidden_layers": 4}, intermediate_size=1024)
    )


def test_pass_holds_at_most_two_decoded_layers(tmp_path: Path) -> None:
    """Not counted are the packed tensors, and half a layer for the activations and kept outputs of two tokens."""
    values = quantised(_wide, folder := tmp_path / "fp8")
    decoded = [weight.nbytes for name, weight in values.items() if name.endswith("_proj.weight")]
    packed = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    session = de.open(str(folder), inputs={"input_ids": torch.tensor([[3, 4]])})
    with (peak := _Peak()):
        session.drift()
    assert packed < peak.most < packed + 2.5 * max(decoded) < sum(decoded)


def test_tree_shows_decoded_weights_without_their_scales(tmp_path: Path) -> None:
    values = quantised(_qwen3_moe, folder := tmp_path / "fp8")
    session, _ = _session(folder, tmp_path)
    for tree in (session.model.tree, session.model.checkpoint.tree() if session.model.checkpoint else None):
        assert tree is not None
        assert tree.totals()[""].parameters == sum(value.numel() for value in values.values())
        assert tree.totals()[""].total_bytes == sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
        assert not [name for name in tree.tensors if "scale" in name]
        assert all(tensor.castable for tensor in tree.tensors.values() if tensor.persistent)
        assert {tensor.dtype for tensor in tree.tensors.values() if tensor.persistent} == {FORMAT, "bfloat16"}


def _export(folder: Path, out: Path, *rules: str) -> None:
    given = [argument for rule in rules for argument in ("--cast", rule)]
    assert run(cli, "dtype-engine", ["export", str(folder), "-o", str(out), *given]) == 0
    assert run(cli, "dtype-engine", ["verify", str(out), "--against", str(folder)]) == 0


@pytest.mark.parametrize("make", MODELS)
def test_export_of_fp8_blocks_without_rules_equals_the_source(make: Make, tmp_path: Path) -> None:
    quantised(make, folder := tmp_path / "fp8")
    _export(folder, tmp_path / "out")
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert _same(tensor, after[name])
    configs = [json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "out")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("rules", [("*=bf16",), ("*.experts=bf16", "*.0.mlp.up_proj=nvfp4")])
def test_cast_fp8_blocks_are_exported_without_quantization_config(
    make: Make,
    rules: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If the scheme's settings can't list the weights that are cast, the other weights are decoded, too, and a note says so."""
    values = quantised(make, folder := tmp_path / "fp8")
    if rules[0] != "*=bf16":
        rules = rules[:1] if make is _qwen3_moe else rules[1:]
    _export(folder, out := tmp_path / "out", *rules)
    said = capsys.readouterr().err
    assert ("that no rule casts" in said) == (rules[0] != "*=bf16")
    exported = load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    assert config.get("quantization_config", {}).get("quant_method") != "fp8"
    for name, value in values.items():
        if f"{name}_packed" not in exported:
            assert _same(exported[name], value.bfloat16()), name
    if rules[0] == "*=bf16":
        assert exported.keys() == values.keys()
        assert "quantization_config" not in config
        _, narrow = plain(folder, values, tmp_path / "plain")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert all(map(torch.equal, loaded.parameters(), narrow.parameters()))


def test_exported_config_lists_cast_layers_beside_packed_ones_as_unquantized(tmp_path: Path) -> None:
    values = quantised(_llama, folder := tmp_path / "fp8")
    _export(folder, out := tmp_path / "out", "*down_proj=bf16")
    before, after = (load_file(each / "model.safetensors") for each in (folder, out))
    plain_now = {name for name in values if "down_proj" in name}
    assert after.keys() == before.keys() - {f"{name}_scale_inv" for name in plain_now}
    for name, tensor in after.items():
        assert _same(tensor, values[name].bfloat16() if name in plain_now else before[name]), name
    listed = json.loads((out / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert set(listed) == {name.removesuffix(".weight") for name in plain_now} | {"lm_head", "model.embed_tokens"}
    (one, ids), (other, _) = (_session(each, tmp_path) for each in (folder, out))
    assert ids.numel()
    one.cast("*down_proj", "bfloat16")
    drifts = [session.drift().output.mean_abs for session in (one, other)]
    assert drifts[0] == pytest.approx(drifts[1], rel=0.2)  # the references differ by the cast


def test_cast_from_fp8_blocks_to_nvfp4_uses_the_decoded_values(tmp_path: Path) -> None:
    values = quantised(_llama, folder := tmp_path / "fp8")
    plain(folder, values, tmp_path / "plain")
    for source, out in ((folder, tmp_path / "of codes"), (tmp_path / "plain", tmp_path / "of values")):
        _export(source, out, "*=bf16", "*_proj=nvfp4")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("of codes", "of values"))
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        assert _same(one[name], tensor), name


def test_export_decodes_a_large_weight_in_chunks(tmp_path: Path) -> None:
    """The memory of an export grows by less than the weight, which has 128 MiB when it is decoded."""
    rows, columns = 8192, 4096
    codes = torch.randint(0, 120, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    save_file(
        {"x.weight": codes, "x.weight_scale_inv": torch.ones(rows // 128, columns // 128)}, tmp_path / "big.safetensors"
    )
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    del codes
    process, most = psutil.Process(os.getpid()), 0
    before = process.memory_full_info().uss

    def note(done: int, total: int) -> None:
        nonlocal most
        most = max(most, process.memory_full_info().uss - before)

    export_checkpoint(open_checkpoint(tmp_path), "big", _recipe("*=bf16"), tmp_path / "out", on_bytes=note)
    assert most < 64 << 20
