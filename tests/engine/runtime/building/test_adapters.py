"""PEFT adapters that are opened onto their bases: the values, the drift and the export, beside plain torch and PEFT's own merge."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.helpers.adapters import KINDS, LAYER, Adapter, linear, llama, make, matrices, pair, save_adapter, save_base
from tests.helpers.checkpoint_folders import tokenizer
from tests.helpers.quantized import CASES

import dtype_engine as de
from dtype_engine.checkpoint.source import locate
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.runtime.weights.checkpoint_weights import source_of

IDS = torch.arange(40).reshape(2, 20) % 64


def engine(*arguments: object) -> int:
    return run(cli, "dtype-engine", list(map(str, arguments)))


def plain_model(base: Path, state: dict[str, torch.Tensor], dtype: torch.dtype, folder: Path) -> Any:
    """The merged model as plain transformers loads it from tensors that were merged by hand."""
    folder.mkdir()
    (folder / "config.json").write_text((base / "config.json").read_text())
    save_file(
        {name: tensor.to(dtype).contiguous() for name, tensor in state.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits.double()  # type: ignore[no-any-return]


def mean_kl(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    p, q = reference.log_softmax(-1), candidate.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def opened(model: Path, **options: Any) -> de.Session:
    return de.open(str(model), options=de.Options(device="cpu", floor="never", **options), inputs={"input_ids": IDS})


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The error of values, relative to the expected ones, which may all be zero."""
    return float((found.double() - expected).norm() / expected.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_those_of_plain_torch(kind: str, tmp_path: Path) -> None:
    folder, expected = make(tmp_path, kind)
    checkpoint = locate(str(folder)).open()
    assert checkpoint is not None
    assert checkpoint.weights.keys() == expected.keys()
    before = load_file(tmp_path / "base" / "model.safetensors")
    for name, values in expected.items():
        source = source_of(checkpoint, name)
        assert relative(source.read().float(), values.float()) < 1e-6
        if values.ndim > 1:
            assert torch.equal(source.rows(1, 3), source.read()[1:3])
        changed = name not in before or not torch.equal(before[name], values)
        assert changed == (name in (checkpoint.merged.weights if checkpoint.merged else ()))


@pytest.mark.parametrize("kind", ["linear layers", "an embedding", "experts in several tensors"])
def test_drift_of_a_base_against_its_adapter_is_that_of_the_two_models(kind: str, tmp_path: Path) -> None:
    folder, expected = make(tmp_path, kind)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    merged = plain_model(tmp_path / "base", expected, torch.float32, tmp_path / "plain")
    there = opened(folder, reference=str(tmp_path / "base")).drift().output
    back = opened(tmp_path / "base", reference=str(folder)).drift().output
    assert there.kl_mean == pytest.approx(mean_kl(logits(base), logits(merged)), rel=1e-4)
    assert back.kl_mean == pytest.approx(mean_kl(logits(merged), logits(base)), rel=1e-4)


def test_drift_of_an_adapter_on_a_base_in_bfloat16_is_that_of_a_merge_in_bfloat16(tmp_path: Path) -> None:
    folder, expected = make(tmp_path, "linear layers", torch.bfloat16)
    reference = plain_model(tmp_path / "base", expected, torch.float32, tmp_path / "wide")
    candidate = plain_model(tmp_path / "base", expected, torch.bfloat16, tmp_path / "narrow")
    session = opened(folder)
    output = session.drift().output
    assert output.kl_mean == pytest.approx(mean_kl(logits(reference), logits(candidate)), rel=1e-3)
    before = load_file(tmp_path / "base" / "model.safetensors")
    lost = {
        name: ((values.bfloat16().double() - values).square().sum(), (values - before[name].double()).square().sum())
        for name, values in expected.items()
        if values.dtype == torch.float32
    }
    found = session.merge_error()
    assert found is not None
    assert found.weights == len(lost) == 3
    assert found.relative == pytest.approx(
        math.sqrt(sum(a for a, _ in lost.values()) / sum(b for _, b in lost.values())), rel=1e-5
    )
    worst = max(lost, key=lambda name: float(lost[name][0] / lost[name][1]))
    assert (found.worst, found.dtypes) == (worst, ("bfloat16",))
    assert found.worst_relative == pytest.approx(math.sqrt(lost[worst][0] / lost[worst][1]), rel=1e-5)


def test_drift_prints_the_error_of_the_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = make(tmp_path, "linear layers", torch.bfloat16)
    assert engine("drift", folder, "--floor", "never", "--json") == 0
    found = json.loads(capsys.readouterr().out)["merge"]
    assert engine("drift", folder, "--floor", "never") == 0
    said = capsys.readouterr()
    assert (
        f"merge      error {100 * found['relative']:.2g} % of the adapter's change; 3 weights rounded to bfloat16"
        in said.out
    )
    assert "the PEFT adapter adapter is merged into base: 3 changed of its 21 weights" in said.err
    assert engine("drift", tmp_path / "base", "--floor", "never") == 0
    assert "merge  " not in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_exported_merge_is_loaded_by_plain_transformers(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, expected = make(tmp_path, kind)
    tokenizer().save_pretrained(folder)
    assert engine("export", folder, "-o", tmp_path / "out") == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    tied = "lm_head.weight" not in expected
    assert bool(config.get("tie_word_embeddings", True)) == tied
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied
    for name, values in expected.items():
        assert relative(found[name], values) < 1e-6
    transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert engine("verify", tmp_path / "out", "--against", folder) == 0


def test_export_rounds_merged_weights_once_to_the_dtypes_of_the_base(tmp_path: Path) -> None:
    folder, expected = make(tmp_path, "linear layers", torch.bfloat16)
    opened(folder).export(tmp_path / "out")
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, expected[name].bfloat16())


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.filterwarnings("ignore")
def test_peft_merges_the_same(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder, _ = make(tmp_path, kind)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    names = ["c_attn", "c_proj"] if kind == "Conv1D" else ["q_proj", "k_proj", "down_proj", "up_proj", "embed_tokens"]
    config = json.loads((folder / "adapter_config.json").read_text())
    if "target_parameters" not in config:
        tensors = load_file(folder / "adapter_model.safetensors")
        config["target_modules"] = [name for name in names if any(f".{name}.lora" in each for each in tensors)]
        config["layers_to_transform"] = None if any("embed" in each for each in tensors) else [1]
    else:
        config |= {"target_modules": [], "layers_to_transform": None}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    merged = peft.PeftModel.from_pretrained(base, folder).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    theirs = load_file(tmp_path / "merged" / "model.safetensors")
    checkpoint = locate(str(folder)).open()
    assert checkpoint is not None
    assert theirs.keys() == checkpoint.weights.keys()
    for name, values in theirs.items():
        assert relative(source_of(checkpoint, name).read(), values) < 1e-6


@pytest.mark.parametrize("name", ["gptq", "bnb nf4", "fp8 in blocks"])
def test_adapter_on_a_quantized_base_is_added_to_the_decoded_values(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    weight, values = next(iter(case.right.items()))
    module = weight.removesuffix(".weight")
    down, up = matrices(*values.shape)
    case.save(tmp_path / "base")
    folder = save_adapter(tmp_path / "adapter", tmp_path / "base", Adapter(pair(module, down, up), {}))
    checkpoint = locate(str(folder)).open()
    assert checkpoint is not None
    source = source_of(checkpoint, weight)
    assert relative(source.read(), torch.from_numpy(values) + 2.5 * (up @ down)) < 1e-6
    assert source.format == f"lora:{case.open(tmp_path / 'again').coded[weight].format}+r4"


def test_model_over_memory_has_the_drift_of_a_model_in_memory(tmp_path: Path) -> None:
    folder, _ = make(tmp_path, "linear layers")
    whole = opened(folder, reference=str(tmp_path / "base")).drift().output
    session = opened(folder, reference=str(tmp_path / "base"), over_memory=True, max_memory={"cpu": 40_000})
    assert session.model.memory.limited
    assert session.drift().output.kl_mean == pytest.approx(whole.kl_mean, rel=1e-4)


UP = f"{LAYER}.mlp.up_proj"
FITTING = pair(UP, *matrices(24, 32))


def unsaved(config: dict[str, Any] | None = None, tensors: dict[str, torch.Tensor] | None = None) -> Adapter:
    return Adapter(FITTING if tensors is None else tensors, {}, config or {})


def renamed(name: str, *shape: int) -> Adapter:
    return unsaved(tensors={name: torch.ones(shape)})


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (unsaved({"peft_type": "IA3"}), "it is an adapter of the kind IA3, and only LORA is merged here; merge it with PEFT"),
        (unsaved({"init_lora_weights": "pissa_niter_4"}), "init_lora_weights is pissa_niter_4, with which PEFT changes"),
        (unsaved({"use_qalora": True}), "adapter_config.json sets use_qalora, which is not merged here"),
        (unsaved({"r": 8}), f"{UP} has rank 4, and adapter_config.json declares 8"),
        (unsaved({"lora_alpha": "many"}), "adapter_config.json has no number as lora_alpha"),
        (
            unsaved(tensors=pair("model.embed_tokens", *matrices(64, 31))),
            "from 31 to 64 values, and the weight of the base is [64, 32]",
        ),
        (unsaved(tensors=pair(f"{LAYER}.mlp", *matrices(64, 32))), f"adapts {LAYER}.mlp, which has no weight in the base"),
        (
            unsaved(tensors={**FITTING, f"{UP}.lora_magnitude_vector": torch.ones(7)}),
            "has DoRA, which is merged here for linear layers alone",
        ),
        (
            unsaved(tensors={name: tensor.to(torch.float8_e5m2) for name, tensor in FITTING.items()}),
            "lora_A.weight is stored as float8_e5m2, which PEFT never does",
        ),
        (unsaved({"rank_pattern": {"(": 4}}), "pattern '('"),
        (renamed("model.norm.thing", 3), "base_model.model.model.norm.thing has no place in the base"),
        (renamed("model.norm.weight", 3), "is [3], and [32] in the base; if tokens were added"),
        (renamed(f"{UP}.lora_A.weight", 4, 32), f"{UP} has no lora_B beside the other"),
        (unsaved(tensors=pair(UP, *matrices(24, 31))), "from 31 to 24 values, and the weight of the base is [24, 32]"),
        (unsaved(tensors=pair("model.layers.7.up", *matrices(24, 32))), "adapts model.layers.7.up, which has no weight"),
        (
            unsaved(tensors={**FITTING, f"{UP}.lora_B.bias": torch.ones(24)}),
            "belongs to a layer that has no bias of its size in the base",
        ),
    ],
)  # fmt: skip
def test_adapter_that_can_not_be_merged_is_refused_in_a_sentence(
    adapter: Adapter, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_base(tmp_path / "base", llama())
    folder = save_adapter(tmp_path / "adapter", tmp_path / "base", adapter)
    capsys.readouterr()  # of transformers
    assert engine("inspect", folder) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith(f"dtype-engine: {folder} can't be merged into its base: ")
    assert said.endswith("; --base none opens it alone\n")
    assert engine("inspect", folder, "--base", "none") == 0
    assert engine("check", folder, "--no-modules") == 1  # a finding, not a refusal


def test_adapter_of_a_tied_head_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_base(tmp_path / "base", llama(tie_word_embeddings=True))
    adapter = unsaved(tensors=pair("lm_head", *matrices(64, 32)))
    assert engine("inspect", save_adapter(tmp_path / "adapter", tmp_path / "base", adapter)) == 2
    assert (
        "it adapts lm_head, whose weight is that of the embedding: merged, both would change" in capsys.readouterr().err
    )


def test_adapter_on_a_sharded_base_is_checked_without_a_finding(tmp_path: Path) -> None:
    base = llama()
    base.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    folder = save_adapter(tmp_path / "adapter", tmp_path / "base", linear(dict(base.state_dict())))
    assert engine("check", folder) == 0


def test_base_is_named_by_the_option_or_by_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_adapter(tmp_path / "adapter", "someone/base", linear(save_base(tmp_path / "base", llama())))
    assert engine("inspect", tmp_path / "adapter") == 0
    said = capsys.readouterr()
    assert "lora_A" in said.out
    assert "not merged: someone/base: no such folder or file" in said.err
    assert engine("drift", tmp_path / "adapter") == 2
    assert "an adapter alone is no model: someone/base: no such folder" in capsys.readouterr().err
    for command in (["inspect"], ["memory"], ["check", "--no-modules"]):
        assert engine(*command, tmp_path / "adapter", "--base", tmp_path / "base") == 0
        assert "is merged into base" in capsys.readouterr().err or command == ["memory"]
    assert engine("inspect", tmp_path / "adapter", "--base", tmp_path / "nothing") == 2
    assert "nothing: no such folder or file" in capsys.readouterr().err
    assert engine("inspect", tmp_path / "adapter", "--base", "net.py:Net") == 2
    assert "net.py:Net is code, and the base of an adapter is a checkpoint" in capsys.readouterr().err
    assert engine("inspect", tmp_path / "base", "--base", tmp_path / "adapter") == 2
    assert "--base goes with a PEFT adapter, and base is none" in capsys.readouterr().err


@pytest.mark.parametrize("named", ["hf://someone/base", "https://example.org/base", "net.py:Net"])
def test_configuration_of_an_adapter_starts_no_request_and_no_code(
    named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_adapter(tmp_path / "adapter", named, linear(save_base(tmp_path / "base", llama())))
    assert engine("inspect", tmp_path / "adapter") == 0
    assert "not merged: " in capsys.readouterr().err


def test_adapter_loads_as_a_plain_module(tmp_path: Path) -> None:
    folder, expected = make(tmp_path, "linear layers")
    state = de.load_pretrained(folder).state_dict()
    for name, values in expected.items():
        assert relative(state[name], values) < 1e-6
