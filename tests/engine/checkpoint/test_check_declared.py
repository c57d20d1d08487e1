"""The check of what config.json, adapter_config.json and an index declare: each contradiction is found, and what agrees is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.file_edits import change_config, change_tensors
from tests.helpers.quantized import CASES
from tests.helpers.quantized.case import words
from tests.helpers.quantized.quantizers import gptq, mlx_affine

from dtype_engine.cli import cli
from dtype_engine.cli.program import run

Tensors = dict[str, torch.Tensor]
Found = list[tuple[str, str]]


def checked(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> Any:
    status = run(cli, "dtype-engine", ["check", str(folder), "--json", *options])
    report = json.loads(capsys.readouterr().out)
    assert status == (1 if report["findings"] else 0)
    return report


def found(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> Found:
    return [(each["kind"], each["tensor"]) for each in checked(capsys, folder, *options)["findings"]]


def rename(folder: Path, new_name: Callable[[str], str]) -> None:
    change_tensors(folder, lambda held: [held.update({new_name(name): held.pop(name)}) for name in list(held)])


# -- quantization ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("method", ["gptq", "auto-round"])
def test_symmetric_codes_have_zero_points_in_the_middle(
    bits: int, form: str, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = gptq(bits, form)
    declared = case.config["quantization_config"]
    declared |= {"sym": True, "quant_method": method}
    declared["packing_format"] = "auto_round:auto_gptq" if form == "gptq" else "auto_round"
    zeros = np.full((3, 64), 2 ** (bits - 1) - (form == "gptq"))
    case.tensors["m.qzeros"] = words(zeros, bits)
    folder = case.save(tmp_path / "m")
    assert found(capsys, folder) == []
    zeros[2, 63] -= 1  # as a file of the other version has all of them
    case.tensors["m.qzeros"] = words(zeros, bits)
    case.save(folder)
    assert found(capsys, folder) == [("declared-scheme", "m.qzeros")]
    for command in (["inspect", str(folder)], ["weights", str(folder)]):
        assert run(cli, "dtype-engine", command) == 0
        said = capsys.readouterr()
        assert "m.qzeros holds other zero points than the middle" in said.out + said.err
    declared["sym"] = False
    case.save(folder)
    assert found(capsys, folder) == []


@pytest.mark.parametrize("zero", [0, 1])
def test_symmetric_int8_has_zero_points_of_zero(zero: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES["ct int8"]()
    case.tensors["x.weight_zero_point"] = torch.full((20, 1), zero, dtype=torch.int8)
    wanted = [("declared-scheme", "x.weight_zero_point")] if zero else []
    assert found(capsys, case.save(tmp_path / "m")) == wanted


@pytest.mark.parametrize("ordered", [True, False])
def test_declared_order_of_columns_needs_an_index(
    ordered: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = gptq(order="shuffled" if ordered else "none")
    case.config["quantization_config"]["desc_act"] = True
    assert found(capsys, case.save(tmp_path / "m")) == ([] if ordered else [("missing-part", "m.qweight")])


@pytest.mark.parametrize(
    ("declared", "contradicts"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, True),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, True),
        ({"quant_method": "fp8", "weight_block_size": [16, 16]}, True),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, True),
        ({"quant_method": "compressed-tensors", "format": "dense"}, False),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, False),  # quantizes plain weights as it loads them
    ],
)
def test_declared_codes_that_no_file_has_are_found(
    declared: dict[str, Any], contradicts: bool, make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}}
    folder = change_config(make_llama(), quantization_config=declared | {"config_groups": groups})
    wanted = [("declared-scheme", "quantization_config")] if contradicts else []
    assert found(capsys, folder, "--no-modules") == wanted


def test_codes_that_no_configuration_declares_are_found(
    make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, case = make_llama(), gptq()

    def quantize(held: Tensors) -> None:
        for layer in ("gate_proj", "up_proj"):
            module = f"model.layers.0.mlp.{layer}"
            del held[f"{module}.weight"]
            held |= {f"{module}.{name.removeprefix('m.')}": part.clone() for name, part in case.tensors.items()}

    change_tensors(folder, quantize)
    assert found(capsys, folder, "--no-modules") == [("declared-scheme", "quantization_config")]
    (folder / "quantize_config.json").write_text(json.dumps(case.config["quantization_config"]))
    assert found(capsys, folder, "--no-modules") == []


@pytest.mark.parametrize("kind", ["gptq", "awq"])
@pytest.mark.parametrize("spoilt", ["method", "shape", ""])
def test_codes_that_the_declared_method_can_not_have_are_found(
    kind: str, spoilt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[kind]()
    if spoilt == "method":
        case.config["quantization_config"]["quant_method"] = "awq" if kind == "gptq" else "gptq"
    elif spoilt == "shape":
        case.tensors["m.qweight"] = case.tensors["m.qweight"][:-5].clone()
    named = "m.scales" if (kind, spoilt) == ("gptq", "shape") else "m.qweight"
    assert found(capsys, case.save(tmp_path / "m")) == ([("part-shape", named)] if spoilt else [])
    if spoilt != "shape":  # a format that is not decoded is no contradiction
        case.config["quantization_config"] |= {"quant_method": "gptq", "checkpoint_format": "marlin"}
        assert found(capsys, case.save(tmp_path / "m")) == []


@pytest.mark.parametrize("prefix", ["", "language_model.", "other."])
def test_settings_of_a_module_under_another_prefix_are_found(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = mlx_affine(4, 32, "model.m")
    own = {"bits": 4, "group_size": 32}
    case.config["quantization"] = {**own, f"{prefix}model.m": own}
    named = found(capsys, case.save(tmp_path / "m"))
    assert named == ([("declared-scheme", f"{prefix}model.m")] if prefix else [])


@pytest.mark.parametrize(("highest", "says"), [(3, False), (4, True), (-1, False)])
def test_group_index_of_compressed_tensors_stays_within_the_groups(
    highest: int, says: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES["ct int4 with ordered columns"]()
    index = case.tensors["x.weight_g_idx"]
    if highest < 0:
        index.fill_(-1)
    else:
        index[0] = highest
    assert found(capsys, case.save(tmp_path / "m")) == ([("group-index", "x.weight_g_idx")] if says else [])


@pytest.mark.parametrize(("value", "says"), [(float("nan"), True), (float("inf"), True), (1.0, False), (-1.0, False)])
def test_scale_of_a_kv_cache_is_finite(
    value: float, says: bool, make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, name = make_llama(), "model.layers.0.self_attn.k_scale"
    change_tensors(folder, lambda held: held.update({name: torch.tensor(value)}))
    assert found(capsys, folder) == ([("scale-values", name)] if says else [])


# -- names, sizes and dtypes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("", "module._orig_mod.", "module._orig_mod."),
        ("", "_fsdp_wrapped_module.", "_fsdp_wrapped_module."),
        ("model.", "model._orig_mod.", "_orig_mod."),
        (".mlp.", "._checkpoint_wrapped_module.mlp.", "_checkpoint_wrapped_module."),
        (".q_proj.", ".q_proj.base_layer.", "base_layer."),
    ],
)
def test_prefixes_of_wrappers_are_named(
    old: str, new: str, named: str, make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama()
    rename(folder, lambda name: name.replace(old, new, 1))
    assert found(capsys, folder, "--no-modules") == [("foreign-prefix", named)]
    assert ("foreign-prefix", named) in found(capsys, folder)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"num_hidden_layers": 4}, ["num_hidden_layers"]),
        ({"num_hidden_layers": 2}, ["num_hidden_layers"]),
        ({"num_hidden_layers": 2, "num_nextn_predict_layers": 1}, []),
        ({"vocab_size": 65}, ["vocab_size"]),
        ({"vocab_size": 60}, []),  # more rows than tokens
        ({}, []),
    ],
)
def test_unknown_architecture_has_the_declared_layers_and_tokens(
    entries: dict[str, int], named: list[str], make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama(num_hidden_layers=3)
    change_config(folder, architectures=["NothingForCausalLM"], model_type="nothing", **entries)
    assert found(capsys, folder) == [("declared-size", each) for each in named]


def test_architecture_that_is_not_compared_is_unchecked(
    make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama()
    assert any("--modules" in each for each in checked(capsys, folder, "--no-modules")["unchecked"])
    assert not any("architecture" in each for each in checked(capsys, folder)["unchecked"])


def test_layer_between_others_is_missing(make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_llama(num_hidden_layers=3)
    change_tensors(folder, lambda held: [held.pop(name) for name in list(held) if ".layers.1." in name])
    (finding,) = checked(capsys, folder, "--no-modules")["findings"]
    assert finding["what"] == "is 3, and no tensor is in model.layers.1"
    kinds = [kind for kind, _ in found(capsys, folder)]
    assert set(kinds) == {"missing-tensor"}
    assert len(kinds) == 9  # of a known architecture each tensor is named instead


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool])
def test_integers_for_floats_are_found(
    dtype: torch.dtype, make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, name = make_llama(), "model.layers.0.mlp.up_proj.weight"
    change_tensors(folder, lambda held: held.update({name: held[name].to(dtype)}))
    assert found(capsys, folder) == [("tensor-dtype", name)]


def test_tensors_that_transformers_leaves_out_on_purpose_are_no_finding(
    make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama()
    change_config(folder, num_nextn_predict_layers=1)

    def add(held: Tensors) -> None:
        held["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        held["model.layers.2.mlp.up_proj.weight"] = torch.ones(2, 2)

    change_tensors(folder, add)
    assert found(capsys, folder) == []


@pytest.mark.parametrize(("lowest", "says"), [(-1e-6, True), (0.0, False)])
def test_negative_variance_of_a_batch_norm_is_found(
    lowest: float, says: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    norm = torch.nn.BatchNorm1d(4, eps=0)
    norm.running_var = torch.tensor([1.0, lowest, 2.0, 3.0])
    save_file(norm.state_dict(), tmp_path / "norm.safetensors")
    assert bool(torch.sqrt(norm.running_var).isnan().any()) == says
    file = tmp_path / "norm.safetensors"
    assert found(capsys, file, "--values") == ([("not-finite", "running_var")] if says else [])


# -- tokenizers and adapters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"vocab.json": {"a": 0, "b": 64}}, ["vocab.json"]),
        ({"added_tokens.json": {"<pad>": 64}}, ["added_tokens.json"]),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"64": {"content": "x"}}}}, ["tokenizer_config.json"]),
        ({"tokenizer_config.json": {"model_max_length": 131072}, "vocab.json": {"a": 63}}, []),
        ({"tokenizer.json": {"model": {"vocab": {"a": 63}}}, "vocab.json": {"a": 64}}, []),  # which nothing reads then
    ],
)
def test_all_files_of_a_tokenizer_are_compared_with_the_embedding(
    files: dict[str, Any], named: list[str], make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama()  # 64 rows
    for file, content in files.items():
        (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
    assert found(capsys, folder) == [("tokenizer", each) for each in named]


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "vocab.json"])
def test_file_beside_the_weights_that_is_cut_is_found(
    file: str, make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama()
    change_tensors(folder, lambda held: held.pop("model.norm.weight"))
    (folder / file).write_text('{"model": {"vocab": {"a')
    assert found(capsys, folder) == [("configuration", file), ("missing-tensor", "model.norm.weight")]


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({}, ""),
        ({"r": 8}, "has rank 4, and adapter_config.json declares 8"),
        ({"r": 8, "rank_pattern": {"layers.0.self_attn.q_proj": 4}}, ""),
        ({"r": 8, "rank_pattern": {"^.*q_proj$": 4}}, ""),  # an expression, which is not evaluated
        ({"target_modules": ["v_proj"]}, "which is none of the target_modules"),
        ({"target_modules": ["q_proj", "v_proj"]}, ""),
        ({"target_modules": "all-linear"}, ""),
        (
            {"r": 2, "target_modules": ["v_proj"], "target_parameters": ["experts.up_proj"]},
            "",
        ),  # 2 for each of 2 experts
        ({"use_dora": True}, "has no lora_magnitude_vector beside it"),
        ({"modules_to_save": ["lm_head", "score"]}, "of which no tensor is in the files"),
        ({"modules_to_save": ["classifier", "extra"]}, ""),  # PEFT itself adds names that the model lacks
    ],
)
def test_adapter_is_compared_with_its_configuration(
    entries: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 4, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | entries))
    pair = {f"{LAYER}.lora_A.weight": torch.ones(4, 8), f"{LAYER}.lora_B.weight": torch.ones(8, 4)}
    extra = {"base_model.model.extra.weight": torch.ones(2)}
    save_file(pair | extra, tmp_path / "adapter_model.safetensors", {"format": "pt"})
    findings = checked(capsys, tmp_path)["findings"]
    assert len(findings) == bool(says)
    assert not says or says in findings[0]["what"]


@pytest.mark.parametrize("spoilt", ["empty", "twice"])
def test_adapter_that_is_empty_or_prefixed_twice_is_found(
    spoilt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    layer = LAYER if spoilt == "empty" else f"base_model.model.{LAYER}"
    up = torch.ones(0) if spoilt == "empty" else torch.ones(8, 4)  # as a rank of ZeRO-3 sees what others hold
    pair = {f"{layer}.lora_A.weight": torch.ones(4, 8), f"{layer}.lora_B.weight": up}
    save_file(pair, tmp_path / "adapter_model.safetensors", {"format": "pt"})
    (finding,) = checked(capsys, tmp_path)["findings"]
    assert ("no values" if spoilt == "empty" else "twice") in finding["what"]


# -- files -------------------------------------------------------------------------------------------------------------


def pickled(folder: Path) -> list[Path]:
    """Turn the shards of a folder into pickles with their index."""
    weight_map, files = {}, []
    for shard in sorted(folder.glob("model-*.safetensors")):
        held, file = (
            load_file(shard),
            folder / shard.name.replace("model", "pytorch_model").replace("safetensors", "bin"),
        )
        torch.save(held, file)
        weight_map |= dict.fromkeys(held, file.name)
        files.append(file)
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files


@pytest.mark.parametrize("as_pickle", [False, True])
@pytest.mark.parametrize("dangling", [False, True])
def test_tensors_of_an_absent_shard_are_missing(
    as_pickle: bool, dangling: bool, make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama(max_shard_size="10KB")
    shards = pickled(folder) if as_pickle else sorted(folder.glob("model-*.safetensors"))
    assert found(capsys, folder) == []
    lost = torch.load(shards[0]) if as_pickle else load_file(shards[0])
    shards[0].unlink()
    if dangling:  # as a cache whose blob was deleted
        shards[0].symlink_to("nowhere")
    assert sorted(found(capsys, folder)) == sorted(("missing-tensor", name) for name in lost)


def test_pickle_index_that_names_another_shard_is_found(
    make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama(max_shard_size="10KB")
    *_, last = pickled(folder)
    index = folder / "pytorch_model.bin.index.json"
    content = json.loads(index.read_text())
    others = [name for name, file in content["weight_map"].items() if file != last.name]
    moved = next(name for name in others if list(content["weight_map"].values()).count(content["weight_map"][name]) > 1)
    content["weight_map"][moved] = last.name
    index.write_text(json.dumps(content))
    assert found(capsys, folder) == [("index-entry", moved)]


def pipeline(encoder: Path, *classes: str) -> Path:
    """Make a pipeline of the folder that holds the folder of a model. Returns it."""
    index = {"_class_name": "Pipeline", encoder.name: list(classes)}
    (encoder.parent / "model_index.json").write_text(json.dumps(index))
    return encoder.parent


def test_absent_shard_of_a_component_is_found(
    make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = make_llama("pipeline/text_encoder", max_shard_size="10KB")
    folder = pipeline(encoder, "transformers", "LlamaForCausalLM")
    assert found(capsys, folder) == []
    shard = min(encoder.glob("model-*.safetensors"))
    lost = load_file(shard)
    shard.unlink()
    assert sorted(found(capsys, folder)) == sorted(("missing-tensor", f"text_encoder.{name}") for name in lost)
