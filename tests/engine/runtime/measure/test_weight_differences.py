"""The weights of two checkpoints, compared one by one: every figure is computed again here by numpy in float64."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import dtype_engine as de
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.options import Options
from dtype_engine.results.weights import DifferentShape, WeightDifference
from dtype_engine.runtime.measure import weight_differences
from dtype_engine.runtime.measure.weight_differences import TwoCheckpoints

Make = Callable[..., Path]


def write(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None) -> Path:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def compared(reference: Path, candidate: Path) -> dict[str, WeightDifference]:
    two = TwoCheckpoints(open_checkpoint(reference), open_checkpoint(candidate), Options())
    assert two.pairing.only_reference == two.pairing.only_candidate == ()
    found = list(two.differences({}))
    assert not [each for each in found if isinstance(each, DifferentShape)]
    return {each.name: each for each in found if isinstance(each, WeightDifference)}


def expected(reference: npt.ArrayLike, candidate: npt.ArrayLike) -> tuple[float, float, float]:
    """Return the SQNR, the largest |Δ| and the mean |Δ|."""
    r, c = np.asarray(reference, np.float64), np.asarray(candidate, np.float64)
    noise = ((c - r) ** 2).sum()
    sqnr = 10 * math.log10((r**2).sum() / noise) if noise else math.inf
    return sqnr, float(np.abs(c - r).max()), float(np.abs(c - r).mean())


def assert_figures(found: WeightDifference, reference: npt.ArrayLike, candidate: npt.ArrayLike) -> None:
    figures = found.sqnr_db, found.max_abs, found.mean_abs
    assert figures == pytest.approx(expected(reference, candidate), rel=1e-9)


def test_weight_differences_to_a_bfloat16_copy_equal_those_of_numpy(make_llama: Make, tmp_path: Path) -> None:
    source = make_llama()
    tensors = load_file(source / "model.safetensors")
    twin = write(tmp_path / "twin", {name: tensor.bfloat16() for name, tensor in tensors.items()})
    found = compared(source, twin)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert_figures(found[name], tensor, tensor.bfloat16().float())
        assert (found[name].reference, found[name].candidate) == ("float32", "bfloat16")
    norm = found["model.norm.weight"]  # ones have no error in bfloat16
    assert norm.equal
    assert norm.sqnr_db == math.inf


@pytest.mark.parametrize("format", ["fp8", "fp8@tensor", "int8", "fp8@128x128", "mxfp4", "nvfp4", "int4@g128"])
def test_weight_differences_to_a_quantized_export_equal_those_of_numpy(
    make_llama: Make, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are those of the exported checkpoint as a whole; they are read here in pieces of a few rows."""
    monkeypatch.setattr(weight_differences, "_VALUES_AT_ONCE", 7 * 160)
    source = make_llama(hidden_size=160, intermediate_size=192)
    session = de.open(str(source))
    session.cast("*.mlp", format)
    session.export(tmp_path / "twin")
    found = compared(source, tmp_path / "twin")
    tensors = load_file(source / "model.safetensors")
    exported = de.open(str(tmp_path / "twin")).model.weights
    for name, tensor in tensors.items():
        assert_figures(found[name], tensor, exported[name].stored.read())
        assert found[name].equal == (".mlp." not in name)


def test_weight_differences_to_fp8_blocks_of_another_program_equal_those_of_numpy(tmp_path: Path) -> None:
    torch.manual_seed(1)
    weight = torch.randn(200, 150)
    scale = torch.rand(2, 2) + 0.5
    codes = (weight / scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :150]).to(torch.float8_e4m3fn)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    right = write(tmp_path / "right", {"x.weight": codes, "x.weight_scale_inv": scale}, config)
    left = write(tmp_path / "left", {"x.weight": weight})
    found = compared(left, right)["x.weight"]
    values = codes.double().numpy() * np.kron(scale.double().numpy(), np.ones((128, 128)))[:200, :150]
    assert_figures(found, weight, values.astype(np.float32))
    assert found.candidate == "fp8:e4m3@128x128"


def test_weights_of_a_base_model_are_matched_without_the_name_prefix(make_llama: Make, tmp_path: Path) -> None:
    """The base model's names lack the prefix "model."."""
    source = make_llama()
    transformers.LlamaModel.from_pretrained(source).half().save_pretrained(tmp_path / "base")
    assert "layers.0.mlp.up_proj.weight" in load_file(tmp_path / "base" / "model.safetensors")
    found = compared(source, tmp_path / "base")
    tensors = load_file(source / "model.safetensors")
    for name, difference in found.items():
        assert difference.reference_name == f"model.{name}"
        assert_figures(difference, tensors[f"model.{name}"], tensors[f"model.{name}"].half().float())


def test_weights_of_a_file_without_a_config_are_matched_by_the_other_config(make_llama: Make, tmp_path: Path) -> None:
    source = make_llama()
    tensors = load_file(source / "model.safetensors")
    short = {name.removeprefix("model."): tensor.half() for name, tensor in tensors.items()}
    for one, other in ((source, write(tmp_path / "short", short)), (tmp_path / "short", source)):
        found = compared(one, other)
        assert len(found) == len(tensors)
        assert all(each.name != each.reference_name for each in found.values())


def test_separate_experts_are_compared_with_the_packed_weight(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, moe_intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=3, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "alone")
    tensors = load_file(tmp_path / "alone" / "model.safetensors")
    packed, prefix = dict(tensors), "model.layers.0.mlp.experts."
    parts = {
        kind: [packed.pop(f"{prefix}{expert}.{kind}_proj.weight") for expert in range(3)]
        for kind in ("gate", "up", "down")
    }
    packed[f"{prefix}gate_up_proj"] = torch.stack(
        [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
    )
    packed[f"{prefix}down_proj"] = torch.stack(parts["down"]).half()
    write(tmp_path / "packed", packed, json.loads((tmp_path / "alone" / "config.json").read_text()))
    for one, other in (("alone", "packed"), ("packed", "alone")):
        two = TwoCheckpoints(open_checkpoint(tmp_path / one), open_checkpoint(tmp_path / other), Options())
        assert two.pairing.only_reference == two.pairing.only_candidate == ()
        found = [each for each in two.differences({}) if isinstance(each, WeightDifference)]
        assert len(found) == len(tensors)
        for each in found:
            whole = each.reference_name if one == "alone" else each.name
            values = tensors[whole]
            if "down_proj" in whole:
                sides = (values, values.half().float())
                assert_figures(each, *(sides if one == "alone" else sides[::-1]))
            else:
                assert each.equal


def as_llama_cpp(name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The rows of queries and keys in the order of llama.cpp, of a model with 4 heads of queries and 2 of keys."""
    for part, heads in (("q_proj", 4), ("k_proj", 2)):
        if part in name:
            return values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
    return values


@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
def test_weights_of_a_gguf_are_matched_by_name_and_row_order(make_llama: Make, tmp_path: Path, kind: str) -> None:
    source = make_llama(num_attention_heads=4, num_key_value_heads=2)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_vocab_size(64)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    tensors = load_file(source / "model.safetensors")
    right, quantised = {}, gguf.GGMLQuantizationType[kind]
    for name, tensor in tensors.items():
        new = names.get_name(name, (".weight",))
        assert new is not None
        values = right[name] = tensor.numpy()
        if values.ndim == 2 and values.shape[-1] % 32 == 0:
            data = gguf.quants.quantize(as_llama_cpp(name, values), quantised)
            writer.add_tensor(new, data, raw_dtype=quantised)
            right[name] = gguf.quants.dequantize(gguf.quants.quantize(values, quantised), quantised)
        else:
            writer.add_tensor(new, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = compared(source, tmp_path / "x.gguf")
    assert set(found) == set(tensors)
    for name, each in found.items():
        assert each.rows == ""
        assert_figures(each, tensors[name], right[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_comparison_reports_and_undoes_the_row_order_of_llama_cpp(
    make_llama: Make, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Converters of GGUF files have left it in safetensors."""
    source = make_llama(num_attention_heads=4, num_key_value_heads=2)
    tensors = load_file(source / "model.safetensors")
    order = {name: torch.from_numpy(as_llama_cpp(name, tensor.numpy())).to(dtype) for name, tensor in tensors.items()}
    found = compared(source, write(tmp_path / "other", order))
    for name, each in found.items():
        heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
        assert each.rows == (f"permuted as by llama.cpp, {heads} heads" if heads else "")
        assert_figures(each, tensors[name], tensors[name].to(dtype).float())


def test_weight_comparison_recognizes_permuted_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight, order = torch.randn(50, 20), torch.randperm(50)
    left, right = write(tmp_path / "a", {"x": weight}), write(tmp_path / "b", {"x": weight[order].double()})
    found = compared(left, right)["x"]
    assert (found.rows, found.equal, found.max_abs) == ("permuted", False, 0.0)
    changed = weight[order].clone()
    changed[3, 3] += 1
    found = compared(left, write(tmp_path / "c", {"x": changed}))["x"]
    assert found.rows == ""
    assert_figures(found, weight, changed)


def test_weight_comparison_handles_nonfinite_values(tmp_path: Path) -> None:
    values = torch.tensor([[1.0, math.nan], [math.inf, 2.0]])
    left = write(
        tmp_path / "a", {"same": values, "lost": torch.ones(2, 2), "none": torch.empty(0, 4), "one": torch.ones(())}
    )
    lost = torch.tensor([[1.0, math.inf], [1.0, 1.0]])
    right = write(
        tmp_path / "b",
        {"same": values.double(), "lost": lost, "none": torch.empty(0, 4).half(), "one": torch.ones(()).half()},
    )
    found = compared(left, right)
    assert found["same"].equal
    assert found["none"].equal
    assert found["one"].equal
    assert (found["lost"].equal, found["lost"].sqnr_db, found["lost"].nonfinite) == (False, -math.inf, 1)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    torch.manual_seed(0)
    a, b, c = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8)
    left = write(tmp_path / "left", {"a": a, "b": b, "c": c, "shape": torch.ones(2, 3), "gone": torch.ones(2)})
    right = write(
        tmp_path / "right", {"a": a.half(), "b": b, "c": c + 0.1, "shape": torch.ones(3, 2), "new": torch.ones(3)}
    )
    return left, right


def test_weights_against_lists_the_worst_first(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    left, right = pair
    assert run(cli, "dtype-engine", ["weights", str(left), "--against", str(right)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "reference", "candidate", "weight", "c", "a", "equal", "shape", "only", "only",
    ]  # fmt: skip
    assert lines[-4] == "equal      1 weight"
    assert lines[-3] == "shape      shape: [2, 3] in the reference, [3, 2] in the candidate"
    assert lines[-2:] == ["only in the reference: 1 weight, gone", "only in the candidate: 1 weight, new"]
    assert run(cli, "dtype-engine", ["weights", str(left), "--against", str(right), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert [weight["name"] for weight in shown["weights"]] == ["c", "a", "b"]
    assert shown["same"] is False
    assert run(cli, "dtype-engine", ["weights", str(left), "--against", str(left)]) == 0


def test_weights_against_refuses_invalid_arguments(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left, right = map(str, pair)
    (tmp_path / "bad.json").write_text("{}")
    for arguments, words in (
        (["--against", right, "--cast", "*=fp16"], "leave out --cast"),
        (["--save", str(tmp_path / "x.json")], "--save goes with --against"),
        (["--against", str(tmp_path / "nothing")], "no such folder or file"),
        (["--against", "json:loads"], "is code"),
        (["--against", right, "--save", str(tmp_path / "bad.json")], "is not a saved comparison"),
    ):
        assert run(cli, "dtype-engine", ["weights", left, *arguments]) == 2
        assert words in capsys.readouterr().err


def test_interrupted_weight_comparison_is_continued(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = map(str, pair)
    saved = tmp_path / "saved.json"
    arguments = ["weights", left, "--against", right, "--save", str(saved), "--json"]
    compare, computed = TwoCheckpoints._difference, []

    def interrupted(self: TwoCheckpoints, pair: Any) -> Any:
        if len(computed) == 2:
            raise KeyboardInterrupt
        computed.append(pair.candidate)
        return compare(self, pair)

    monkeypatch.setattr(TwoCheckpoints, "_difference", interrupted)
    assert run(cli, "dtype-engine", arguments) == 130
    first = json.loads(capsys.readouterr().out)
    assert (first["pending"], len(first["weights"])) == (2, 2)
    monkeypatch.setattr(
        TwoCheckpoints, "_difference", lambda self, pair: computed.append(pair.candidate) or compare(self, pair)
    )
    assert run(cli, "dtype-engine", arguments) == 1
    assert json.loads(capsys.readouterr().out)["pending"] == 0
    assert sorted(computed) == ["a", "b", "c", "shape"]
    (pair[1] / "model.safetensors").touch()
    assert run(cli, "dtype-engine", arguments) == 2
    assert "was made with other files" in capsys.readouterr().err
