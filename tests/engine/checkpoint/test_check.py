"""The check of a checkpoint reports each damage under its kind and nothing else, and has no finding for an intact checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.quantized.quantizers import gptq

import dtype_engine as de
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.check import check
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.results.check import KINDS

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
DOWN, UP, QUERY = "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj"
BLOCK = 16


def _fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float8 codes and block scales of a weight, computed independently of the engine."""
    rows, columns = weight.shape
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    scales = torch.empty(down, across)
    codes = torch.empty(rows, columns).to(torch.float8_e4m3fn)
    for row in range(down):
        for column in range(across):
            at = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
            scales[row, column] = weight[at].float().abs().max() / 448
            codes[at] = (weight[at].float() / scales[row, column]).to(torch.float8_e4m3fn)
    return codes, scales


@pytest.fixture
def quantised(make_llama: Callable[..., Path]) -> Path:
    """Return the folder of a Llama in bfloat16 whose linear layers are in fp8 blocks."""
    folder = make_llama(dtype="bfloat16", tie_word_embeddings=False)
    made: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj" in name:
            made[name], made[f"{name}_scale_inv"] = _fp8(tensor)
        else:
            made[name] = tensor
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _lose_a_scale(tensors: Tensors, config: Config) -> None:
    del tensors[f"{DOWN}.weight_scale_inv"]


def _orphan_a_scale(tensors: Tensors, config: Config) -> None:
    tensors[f"{DOWN}.weight"] = torch.randn(32, 48).bfloat16()


def _cut_a_scale(tensors: Tensors, config: Config) -> None:
    tensors[f"{DOWN}.weight_scale_inv"] = tensors[f"{DOWN}.weight_scale_inv"][:1].clone()


def _spoil_scales(tensors: Tensors, config: Config) -> None:
    tensors[f"{DOWN}.weight_scale_inv"].view(-1)[:4] = torch.tensor([float("nan"), 0.0, -1.0, float("inf")])


def _widen_a_sibling(tensors: Tensors, config: Config) -> None:
    del tensors[f"{QUERY}.weight_scale_inv"]
    tensors[f"{QUERY}.weight"] = torch.randn(32, 32).bfloat16()


def _declare_another_dtype(tensors: Tensors, config: Config) -> None:
    config["dtype"] = "float16"


def _round_an_island(tensors: Tensors, config: Config) -> None:
    tensors["model.layers.0.mlp.gate.e_score_correction_bias"] = torch.randn(4).bfloat16()
    config["model_type"] = "deepseek_v3"


def _lose_a_weight(tensors: Tensors, config: Config) -> None:
    del tensors["model.norm.weight"]


def _add_a_tensor(tensors: Tensors, config: Config) -> None:
    tensors["model.layers.1.mlp.extra.weight"] = torch.randn(4, 4).bfloat16()


def _untie(tensors: Tensors, config: Config) -> None:
    config["tie_word_embeddings"] = True


def _prefix(tensors: Tensors, config: Config) -> None:
    for name in list(tensors):
        tensors[f"module.{name}"] = tensors.pop(name)


def _make_infinite(tensors: Tensors, config: Config) -> None:
    tensors["lm_head.weight"].view(-1)[5] = float("inf")


def _flatten(tensors: Tensors, config: Config) -> None:
    tensors["lm_head.weight"].fill_(0.25)


Damage = Callable[[Tensors, Config], None]
DAMAGES: dict[str, tuple[Damage, str, str, tuple[str, ...]]] = {
    # by what it does: the damage, the kind, the tensor that is named, the options that find it
    "a scale is lost": (_lose_a_scale, "missing-part", f"{DOWN}.weight", ()),
    "a scale has no codes": (_orphan_a_scale, "orphan-part", f"{DOWN}.weight_scale_inv", ()),
    "a scale is cut": (_cut_a_scale, "part-shape", f"{DOWN}.weight_scale_inv", ()),
    "scales are NaN, zero and negative": (_spoil_scales, "scale-values", f"{DOWN}.weight_scale_inv", ()),
    "one of q, k and v is wide": (_widen_a_sibling, "mixed-siblings", "model.layers.0.self_attn", ()),
    "another dtype is declared": (_declare_another_dtype, "declared-dtype", "dtype", ()),
    "a float32 island is rounded": (
        _round_an_island, "float32-island", "model.layers.0.mlp.gate.e_score_correction_bias", ("--no-modules",),
    ),
    "a weight is lost": (_lose_a_weight, "missing-tensor", "model.norm.weight", ()),
    "a tensor belongs to nothing": (_add_a_tensor, "unused-tensor", "model.layers.1.mlp.extra.weight", ()),
    "tied weights differ": (_untie, "tie-differs", "lm_head.weight", ("--no-modules",)),
    "all names have a prefix": (_prefix, "foreign-prefix", "module.", ("--no-modules",)),
    "a value is infinite": (_make_infinite, "not-finite", "lm_head.weight", ("--values",)),
    "a matrix is constant": (_flatten, "constant", "lm_head.weight", ("--values",)),
}  # fmt: skip


def checked(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> tuple[int, Any]:
    status = run(cli, "dtype-engine", ["check", str(folder), "--json", *options])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("damage", DAMAGES)
def test_check_reports_only_the_damaged_tensor(
    damage: str, quantised: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, kind, named, options = DAMAGES[damage]
    file, config = quantised / "model.safetensors", json.loads((quantised / "config.json").read_text())
    tensors = load_file(file)
    spoil(tensors, config)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    (quantised / "config.json").write_text(json.dumps(config))
    status, found = checked(capsys, quantised, *options)
    assert [(each["kind"], each["tensor"]) for each in found["findings"]] == [(kind, named)]
    assert status == 1


def test_check_counts_damaged_scales(quantised: Path) -> None:
    tensors = load_file(quantised / "model.safetensors")
    _spoil_scales(tensors, {})
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    (finding,) = check(open_checkpoint(quantised), "x").findings
    assert finding.what == "holds 6 scales, of which 1 is NaN and 1 is infinite and 1 is zero and 1 is negative"


def test_check_of_an_undamaged_checkpoint_has_no_findings(
    quantised: Path, make_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_llama("plain", dtype="bfloat16", max_shard_size="10KB", intermediate_size=64)
    for rule, name in (("*.mlp=fp8", "fp8"), ("*.mlp=mxfp4", "mxfp4"), ("*.{gate,up}_proj=nvfp4", "nvfp4")):
        session = de.open(str(plain))
        session.cast(*rule.split("="))
        session.export(tmp_path / name)
    for folder in (quantised, plain, tmp_path / "fp8", tmp_path / "mxfp4", tmp_path / "nvfp4"):
        status, found = checked(capsys, folder, "--values")
        assert (status, found["findings"]) == (0, [])
    # What the export wrote is a checkpoint of compressed-tensors to every other program: without our own metadata it is one here.
    for name in ("fp8", "mxfp4", "nvfp4"):
        file = tmp_path / name / "model.safetensors"
        save_file(load_file(file), file, {"format": "pt"})
        status, found = checked(capsys, tmp_path / name, "--values")
        assert (status, found["findings"]) == (0, [])
        assert found["scales"]


def test_check_against_the_source_reports_missing_extra_and_reshaped_tensors(
    quantised: Path, make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_llama("source", dtype="bfloat16", tie_word_embeddings=False)
    assert checked(capsys, quantised, "--against", str(source))[0] == 0
    tensors = load_file(quantised / "model.safetensors")
    for name in (f"{UP}.weight", f"{UP}.weight_scale_inv"):
        del tensors[name]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:16].clone()
    tensors["model.new.weight"] = torch.randn(3, 3).bfloat16()
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    status, found = checked(capsys, quantised, "--against", str(source), "--no-modules")
    assert status == 1
    assert [(each["kind"], each["tensor"]) for each in found["findings"]] == [
        ("against-missing", f"{UP}.weight"),
        ("against-shape", "model.norm.weight"),
        ("against-new", "model.new.weight"),
    ]


def test_sarif_has_a_rule_for_each_kind_of_finding_and_a_result_for_each_finding(
    quantised: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(quantised / "model.safetensors")
    _lose_a_scale(tensors, {})
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    assert run(cli, "dtype-engine", ["check", str(quantised), "--sarif"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    (rule,) = found["tool"]["driver"]["rules"]
    (result,) = found["results"]
    assert rule["id"] == result["ruleId"] == "missing-part"
    assert "unslothai/unsloth#6200" in rule["fullDescription"]["text"]
    (location,) = result["locations"]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == (quantised / "model.safetensors").as_uri()
    assert location["logicalLocations"][0]["fullyQualifiedName"] == f"{DOWN}.weight"


def test_text_report_of_check_explains_each_finding(quantised: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "dtype-engine", ["check", str(quantised), "--no-modules"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing found"
    tensors = load_file(quantised / "model.safetensors")
    _lose_a_scale(tensors, {})
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    assert run(cli, "dtype-engine", ["check", str(quantised), "--no-modules"]) == 1
    said = capsys.readouterr().out
    assert KINDS["missing-part"].why in said
    assert f"{DOWN}.weight holds float8_e4m3fn codes and has no {DOWN}.weight_scale_inv" in said


@pytest.mark.parametrize(("bad", "words"), [(1, "has 1 value that is not"), (2, "has 2 values that are not")])
def test_check_counts_values_that_are_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: int, words: str
) -> None:
    weight = torch.ones(4, 4)
    weight.view(-1)[:bad] = math.inf
    save_file({"weight": weight}, tmp_path / "net.safetensors", {"format": "pt"})
    assert run(cli, "dtype-engine", ["check", str(tmp_path / "net.safetensors"), "--values"]) == 1
    assert words in capsys.readouterr().out


def test_check_refuses_missing_folders_and_python_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text("Net = None\n")
    for arguments in (["no-such-folder"], [f"{tmp_path / 'net.py'}:Net"], ["demo", "--json", "--sarif"]):
        assert run(cli, "dtype-engine", ["check", *arguments]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_check_reports_every_tensor_of_a_missing_shard(
    make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama(max_shard_size="10KB")
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    lost = set(load_file(shard))
    shard.unlink()
    status, found = checked(capsys, folder)
    assert status == 1
    assert {(each["kind"], each["tensor"]) for each in found["findings"]} == {("missing-tensor", name) for name in lost}
    assert run(cli, "dtype-engine", ["check", str(folder), "--sarif"]) == 1
    results = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    assert {each["ruleId"] for each in results} == {"missing-tensor"}


@pytest.mark.parametrize("spoilt", [7, -1, None])
def test_check_finds_a_column_whose_group_has_no_scale(
    spoilt: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order = torch.arange(32, dtype=torch.int32) // 16
    if spoilt is not None:
        order[5] = spoilt
    stem = "model.layers.0.mlp.up_proj"
    tensors = {
        f"{stem}.qweight": torch.randint(0, 2**31 - 1, (4, 8), dtype=torch.int32),
        f"{stem}.qzeros": torch.full((2, 1), 0x77777777, dtype=torch.int32),
        f"{stem}.scales": torch.ones(2, 8, dtype=torch.float16),
        f"{stem}.g_idx": order,
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": settings}))
    _, found = checked(capsys, tmp_path, "--no-modules")
    wanted = [] if spoilt is None else [("group-index", f"{stem}.g_idx")]
    assert [(each["kind"], each["tensor"]) for each in found["findings"]] == wanted


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize(("part", "short"), [("g_idx", (slice(0, 88),)), ("qzeros", (slice(None), slice(0, -1)))])
def test_check_names_the_part_of_a_gptq_weight_that_is_cut(
    part: str, short: tuple[slice, ...], bits: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = gptq(bits, order="shuffled")
    case.tensors[f"m.{part}"] = case.tensors[f"m.{part}"][short].clone()
    _, found = checked(capsys, case.save(tmp_path / "m"), "--no-modules")
    assert [(each["kind"], each["tensor"]) for each in found["findings"]] == [("part-shape", f"m.{part}")]


def _adapter(folder: Path, layers: dict[str, tuple[int, int]], rank: int = 4) -> Path:
    """A LoRA for layers of the given numbers of inputs and outputs, as PEFT names its tensors."""
    folder.mkdir()
    tensors = {}
    for layer, (inputs, outputs) in layers.items():
        tensors[f"base_model.model.{layer}.lora_A.weight"] = torch.randn(rank, inputs)
        tensors[f"base_model.model.{layer}.lora_B.weight"] = torch.randn(outputs, rank)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("layer", "sizes", "says"),
    [
        ("model.layers.1.self_attn.q_proj", (32, 32), ""),
        ("model.layers.1.mlp.down_proj", (48, 32), ""),
        ("model.layers.7.self_attn.q_proj", (32, 32), "which the base model lacks"),
        ("model.layers.1.self_attn.wq", (32, 32), "which the base model lacks"),
        ("model.layers.1.self_attn.k_proj", (32, 32), "from 32 to 32 values, and its weight is [16, 32]"),
    ],
)
def test_check_compares_shapes_of_an_adapter_with_its_base_model(
    layer: str, sizes: tuple[int, int], says: str, tmp_path: Path, make_llama: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    base = make_llama()
    folder = _adapter(tmp_path / "adapter", {layer: sizes, "model.layers.0.mlp.gate_proj": (32, 48)})
    status, alone = checked(capsys, folder)
    assert (status, alone["findings"]) == (0, [])
    assert any("org/base: --against BASE compares them" in said for said in alone["unchecked"])
    status, found = checked(capsys, folder, "--against", str(base))
    assert (status, len(found["findings"])) == ((1, 1) if says else (0, 0))
    assert not says or says in found["findings"][0]["what"]


def test_missing_lora_halves_and_rank_mismatches_are_found_without_base_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _adapter(tmp_path / "adapter", {"a": (8, 8), "b": (8, 8)})
    tensors = load_file(folder / "adapter_model.safetensors")
    del tensors["base_model.model.a.lora_B.weight"]
    tensors["base_model.model.b.lora_A.weight"] = torch.randn(3, 8)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    status, found = checked(capsys, folder)
    assert status == 1
    assert [each["what"] for each in found["findings"]] == [
        "has no lora_B beside it",
        "has rank 3, and the lora_B beside it has rank 4",
    ]


@pytest.mark.parametrize("extra", [0, 6, 7])
@pytest.mark.parametrize("kind", ["WordLevel", "Unigram"])
def test_check_finds_tokenizer_ids_beyond_the_rows_of_the_embedding(
    kind: str, extra: int, make_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    import tokenizers

    folder = make_llama()  # 64 rows
    words = [f"w{place}" for place in range(58)]
    model = (
        tokenizers.models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="w0")
        if kind == "WordLevel"
        else tokenizers.models.Unigram([(word, 0.0) for word in words], 0, False)
    )
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens([f"<{place}>" for place in range(extra)])
    made.save(str(folder / "tokenizer.json"))
    highest = max(made.get_vocab(with_added_tokens=True).values())
    assert highest == 57 + extra
    status, found = checked(capsys, folder)
    findings = [(each["kind"], each["tensor"], each["what"]) for each in found["findings"]]
    wanted = [("tokenizer", "tokenizer.json", "has ids up to 64, and model.embed_tokens.weight has 64 rows")]
    assert (status, findings) == ((1, wanted) if highest >= 64 else (0, []))
