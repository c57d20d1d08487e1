"""Checkpoints with a draft head: it is shown, cast, exported and checked, and no pass or search touches it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.helpers.draft_heads import NAMES, head_of, linear_layers, with_head
from tests.helpers.file_edits import Tensors, change_config, change_tensors

import dtype_engine as de
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.errors import UserError
from dtype_engine.recipe import make_plan
from dtype_engine.recipe.presets import preset_effects
from dtype_engine.search.pareto import Constraints

pytestmark = pytest.mark.cpu_only("it is about files")


@pytest.fixture(params=NAMES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    with_head(kind, tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def head(kind: str, folder: Path) -> Tensors:
    return {name: each for name, each in stored(folder).items() if name.startswith(f"{head_of(kind)}.")}


def stored(folder: Path) -> Tensors:
    """Return all tensors of a folder, read by safetensors alone."""
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


def command(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 0) -> str:
    """Run the program, and return what it prints on both outputs."""
    capsys.readouterr()
    assert run(cli, "dtype-engine", list(map(str, arguments))) == status
    printed = capsys.readouterr()
    return printed.out + printed.err


def found(capsys: pytest.CaptureFixture[str], folder: Path, *options: str | Path) -> list[tuple[str, str]]:
    capsys.readouterr()
    run(cli, "dtype-engine", ["check", str(folder), "--json", *map(str, options)])
    return [(each["kind"], each["tensor"]) for each in json.loads(capsys.readouterr().out)["findings"]]


def exported(folder: Path, *rules: str, name: str = "out", layout: str = "compressed-tensors") -> tuple[Path, Any]:
    """Export a folder without opening the model, and return (the new folder, the report)."""
    target = folder.parent / name
    session = de.open(str(folder))
    session.apply(de.Recipe.of(map(de.Rule.parse, rules)))
    return target, session.export(target, layout=layout)


# -- the tree ----------------------------------------------------------------------------------------------------------


def test_draft_head_is_a_node_of_the_tree_with_its_bytes(
    kind: str, folder: Path, head: Tensors, capsys: pytest.CaptureFixture[str]
) -> None:
    nbytes = sum(each.nbytes for each in head.values())
    text = command(capsys, "inspect", folder, "--depth", "3")
    (line,) = (line for line in text.splitlines() if "draft head (MTP)" in line and "no forward pass" not in line)
    assert line.split()[0] == head_of(kind).rpartition(".")[2]
    assert f"{nbytes / 1024:.2f} KiB" in line
    assert "draft head (MTP)" in text.splitlines()[-1]
    report = json.loads(command(capsys, "inspect", folder, "--json"))
    assert report["draft_head"] == [head_of(kind)]
    assert report["stored_bytes"] == sum(each.nbytes for each in stored(folder).values())
    (module,) = (each for each in report["modules"] if each["name"] == head_of(kind))
    assert module["bytes"] == nbytes


def test_model_in_memory_has_the_head_in_its_tree_and_not_in_its_passes(kind: str, folder: Path, head: Tensors) -> None:
    session = de.open(str(folder))
    assert set(session.tree.of_draft) == set(head)
    assert not any(name.startswith(head_of(kind)) for name, _ in session.model.module.named_parameters())
    assert any("no forward pass uses it" in notice for notice in session.model.notices)
    assert not any("not used by" in notice for notice in session.model.notices)
    session.cast(head_of(kind), "float16")
    report = session.drift()
    assert report.output.max_abs == 0
    assert report.memory.planned_bytes == session.tree.stored_bytes - sum(each.nbytes // 2 for each in head.values())


def test_layers_of_the_head_have_the_classes_of_the_model(kind: str, folder: Path, head: Tensors) -> None:
    tree = de.open(str(folder)).tree
    linear = {name for name in tree.modules if tree.draft.holds(name) and tree.modules[name].class_name == "Linear"}
    assert linear == linear_layers(head)
    norms = {name.removesuffix(".weight") for name in head if "norm" in name.split(".")[-2]}
    assert norms
    assert all("RMSNorm" in str(tree.modules[name].class_name) for name in norms)


def test_kv_caches_are_those_of_the_layers_that_a_pass_runs(kind: str, folder: Path) -> None:
    with_it = de.open(str(folder)).tree.kv_cache
    assert "without the cache of the draft head (MTP)" in with_it.notes
    assert open_checkpoint(folder).tree().kv_cache.tensors == with_it.tensors  # by the headers alone
    change_tensors(folder, lambda held: [held.pop(name) for name in list(held) if name.startswith(head_of(kind))])
    assert with_it.tensors == de.open(str(folder)).tree.kv_cache.tensors


# -- exports -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["folder", "shards", "one.safetensors", "one.pth"])
def test_every_export_keeps_the_head_as_stored(target: str, folder: Path, head: Tensors) -> None:
    session = de.open(str(folder))
    session.cast("lm_head", "bfloat16")
    written = folder.parent / target
    report = session.export(written, max_shard_size="50KB" if target == "shards" else "5GB")
    assert any("written as stored" in notice for notice in report.notices)
    assert (len(report.files) > 2) == (target == "shards")
    if target == "one.pth":
        after = torch.load(written, weights_only=True)
    else:
        after = load_file(written) if written.is_file() else stored(written)
    assert all(torch.equal(after[name], each) for name, each in head.items())


def test_rules_cast_the_head_as_torch_does(kind: str, folder: Path, head: Tensors) -> None:
    written, report = exported(folder, f"{head_of(kind)}.*=bfloat16")
    after, before = stored(written), stored(folder)
    assert {name for name in after if after[name].dtype == torch.bfloat16} == set(head)
    assert all(torch.equal(after[name], each.bfloat16()) for name, each in head.items())
    assert all(torch.equal(after[name], each) for name, each in before.items() if name not in head)
    assert any("no drift covers this" in notice for notice in report.notices)
    session = de.open(str(folder))
    session.cast(f"{head_of(kind)}.*", "bfloat16")
    assert session.verify(written).same


def test_linear_layers_of_the_head_get_codes_and_scales(kind: str, folder: Path, head: Tensors) -> None:
    written, _ = exported(folder, "type:Linear=int8", "lm_head=stored")
    after = stored(written)
    linear = linear_layers(head)
    for module in linear:
        codes, scale = after[f"{module}.weight"], after[f"{module}.weight_scale"]
        weight = head[f"{module}.weight"]
        assert codes.dtype == torch.int8
        torch.testing.assert_close(scale.float(), weight.abs().amax(1, keepdim=True) / 127, rtol=1e-6, atol=0)
        assert torch.equal(codes.float(), torch.round(weight / scale).clamp(-128, 127))
    settings = json.loads((written / "config.json").read_text())["quantization_config"]
    assert "lm_head" in settings["ignore"]
    targets = [each for group in settings["config_groups"].values() for each in group["targets"]]
    assert {name for name in linear if ".experts." not in name} <= set(targets)
    rest = {name: each for name, each in head.items() if name.removesuffix(".weight") not in linear}
    assert all(torch.equal(after[name], each) for name, each in rest.items())


def test_settings_list_the_layers_of_a_head_without_scales(folder: Path, head: Tensors) -> None:
    written, _ = exported(folder, "model.layers.1.self_attn.o_proj=int8")
    settings = json.loads((written / "config.json").read_text())["quantization_config"]
    assert {name for name in linear_layers(head) if ".experts." not in name} <= set(settings["ignore"])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_transformers_loads_the_model_of_an_export_whose_head_is_cast(dtype: str, kind: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    written, _ = exported(folder, f"{head_of(kind)}={dtype}")
    assert "transformers_weights" not in json.loads((written / "config.json").read_text())
    before = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    after = transformers.AutoModelForCausalLM.from_pretrained(written).state_dict()
    assert config["model_type"] == kind
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], each) for name, each in before.items())


def test_rounding_by_inputs_leaves_the_head_at_the_nearest_values(kind: str, folder: Path) -> None:
    rules = (f"{head_of(kind)}.*.self_attn.*_proj={{}}", f"{head_of(kind)}.self_attn.*_proj={{}}")
    rule = rules[kind == "deepseek_v3"]
    rounded, report = exported(folder, rule.format("int4@g32:gptq"), name="rounded")
    nearest, _ = exported(folder, rule.format("int4@g32"), name="nearest")
    one, other = stored(rounded), stored(nearest)
    assert one.keys() == other.keys()
    assert any(name.endswith("_packed") for name in one)
    assert all(torch.equal(one[name], each) for name, each in other.items())
    assert any("nearest values" in notice and "draft head" in notice for notice in report.notices)


def test_layout_of_gptq_has_the_head(kind: str, folder: Path, head: Tensors) -> None:
    modules = [name for name in linear_layers(head) if "shared_expert" in name and not name.endswith("_gate")]
    written, report = exported(folder, *(f"{name}=int4@g32" for name in modules), layout="gptq")
    after = stored(written)
    assert all(f"{name}.qweight" in after for name in modules)
    assert not any("transformers" in notice and "will not load" in notice for notice in report.notices)
    settings = json.loads((written / "config.json").read_text())["quantization_config"]
    assert sorted(settings["modules_in_block_to_quantize"][0]) == sorted(modules)


def test_values_of_the_head_that_a_cast_loses_are_counted(kind: str, folder: Path) -> None:
    name = f"{head_of(kind)}.{'eh_proj' if kind == 'deepseek_v3' else 'fc'}.weight"
    change_tensors(folder, lambda held: held[name][0].fill_(1e6))
    _, report = exported(folder, f"{head_of(kind)}=float16")
    (loss,) = (each for each in report.lost if not each.is_rounding)
    assert (loss.tensor, loss.overflowed) == (name, 64)


def test_flipped_bit_in_the_head_of_an_export_is_found(head: Tensors, folder: Path) -> None:
    written, _ = exported(folder, "*=bfloat16")
    name = next(name for name, each in head.items() if each.ndim == 2)
    change_tensors(written, lambda held: held[name].view(torch.int16)[0].bitwise_xor_(1))
    session = de.open(str(folder))
    session.cast("*", "bfloat16")
    report = session.verify(written)
    assert [each.name for each in report.differences] == [name]


# -- scans and searches ------------------------------------------------------------------------------------------------


def test_search_leaves_the_head_as_stored(kind: str, folder: Path, head: Tensors) -> None:
    session = de.open(str(folder))
    report = session.scan(["bfloat16", "int8"])
    assert not any(session.tree.draft.holds(each.name) for each in report.weights)
    assert any("draft head (MTP)" in notice for notice in report.notices)
    assert session.predict(de.Recipe.of([de.Rule.parse("*=bfloat16")])).value > 0
    whole = session.tree.stored_bytes
    found_recipe = session.search(budget=whole * 3 // 4, constraints=Constraints(formats="own"))
    session.apply(found_recipe)
    planned = session.plan.dtypes
    assert {planned[name] for name in head} == {"float32"}
    assert set(planned.values()) != {"float32"}


def test_presets_in_low_precision_keep_the_head_in_16_bits(folder: Path, head: Tensors) -> None:
    tree = de.open(str(folder)).tree
    for effect in preset_effects(tree):
        if effect.recipe is not None and len(effect.preset.casts_to) > 1:
            planned = make_plan(tree, effect.recipe).dtypes
            assert {planned[name] for name in head} <= {"bfloat16", "float16", "float32"}, effect.preset.name


# -- checks ------------------------------------------------------------------------------------------------------------


def twin_without(kind: str, folder: Path) -> Path:
    """Copy a checkpoint without its head, as transformers saves it."""
    twin = folder.parent / "twin"
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(twin)
    assert not any(name.startswith(head_of(kind)) for name in stored(twin))
    return twin


def test_twin_that_lost_the_head_is_found(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert found(capsys, folder) == []
    twin = twin_without(kind, folder)
    declared = [("draft-head", "num_nextn_predict_layers")] if kind == "deepseek_v3" else []
    assert found(capsys, twin) == declared
    change_config(twin, num_nextn_predict_layers=1)
    alone = [("draft-head", "num_nextn_predict_layers")]
    assert found(capsys, twin) == alone
    assert found(capsys, twin, "--against", folder) == [*alone, ("draft-head", head_of(kind))]
    assert found(capsys, folder, "--against", twin) != []
    text = command(capsys, "drift", folder, "--against", twin)
    assert "source has a draft head (MTP), and twin has none" in text


def test_missing_and_orphan_parts_of_the_head_are_found(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"{head_of(kind)}.{'eh_proj' if kind == 'deepseek_v3' else 'fc'}"
    written, _ = exported(folder, f"{module}=int8")
    assert found(capsys, written) == []
    change_tensors(written, lambda held: held.pop(f"{module}.weight"))
    assert ("orphan-part", f"{module}.weight_scale") in found(capsys, written)
    change_tensors(written, lambda held: held.pop(f"{module}.weight_scale"))
    assert ("draft-head", module) in found(capsys, written)


# -- runtimes and tools ------------------------------------------------------------------------------------------------

UNDER_VLLM = {"deepseek_v3": {"eh_proj", "shared_head.head"}, "qwen3_next": set[str]()}
"""The layers of a head that vLLM builds without scales, read from its source code."""


def lint(
    capsys: pytest.CaptureFixture[str], folder: Path, runtime: str, *rules: tuple[str, str]
) -> tuple[list[Any], list[str]]:
    """Return (the findings on the head, the notes) of a recipe for a runtime."""
    file = folder.parent / "recipe.yaml"
    lines = [f'  - {{pattern: "{pattern}", dtype: {dtype}}}' for pattern, dtype in rules]
    file.write_text("\n".join(["version: 1", "rules:", *lines]) + "\n")
    capsys.readouterr()
    run(cli, "dtype-engine", ["recipe", "lint", str(file), "--for", runtime, "--model", str(folder), "--json"])
    answer = json.loads(capsys.readouterr().out)
    return [each for each in answer["findings"] if "_mtp" in each["source"] or "nextn" in each["source"]], answer[
        "notes"
    ]


def test_vllm_builds_some_layers_of_the_head_without_scales(
    kind: str, folder: Path, head: Tensors, capsys: pytest.CaptureFixture[str]
) -> None:
    findings, (note,) = lint(capsys, folder, "vllm", ("type:Linear", "fp8"))
    named = {name.removeprefix(f"{head_of(kind)}.") for each in findings for name in each["tensors"]}
    assert named == {f"{each}.weight" for each in UNDER_VLLM[kind]}
    assert f"{len(linear_layers(head))} in fp8" in note
    kept = [(f"{head_of(kind)}.{each}", "stored") for each in UNDER_VLLM[kind]]
    assert lint(capsys, folder, "vllm", ("type:Linear", "fp8"), *kept)[0] == []
    assert lint(capsys, folder, "vllm", ("type:Linear", "fp8"), (head_of(kind), "stored"))[0] == []


def test_sglang_looks_up_the_layers_of_the_head_under_other_names(
    kind: str, folder: Path, head: Tensors, capsys: pytest.CaptureFixture[str]
) -> None:
    findings, _ = lint(capsys, folder, "sglang", ("type:Linear", "fp8"))
    looked_up = "model.decoder" if kind == "deepseek_v3" else "model.layers.0"
    assert any(f"as those of {looked_up}, and finds none" in each["why"] for each in findings)
    wide, _ = lint(capsys, folder, "sglang", ("type:Linear", "fp8"), (head_of(kind), "stored"))
    assert ["finds those of a layer in fp8" in each["why"] for each in wide] == [True] * (kind == "qwen3_next")
    if kind == "qwen3_next":  # its first layer has experts of the same names
        (finding,), _ = lint(capsys, folder, "sglang", ("model.layers.*.mlp.experts", "fp8"))
        assert "finds those of a layer in fp8" in finding["why"]
        assert set(finding["tensors"]) == {name for name in head if ".experts." in name}


@pytest.mark.parametrize("tool", ["llm-compressor", "torchao", "modelopt", "transformers", "llama.cpp"])
def test_recipe_for_another_tool_says_that_it_does_not_reach_the_head(
    tool: str, kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "qwen3_next" and tool == "llama.cpp":
        pytest.importorskip("gguf")
    file = folder.parent / "recipe.yaml"
    file.write_text(f'version: 1\nrules:\n  - {{pattern: "{head_of(kind)}", dtype: bfloat16}}\n')
    capsys.readouterr()
    run(cli, "dtype-engine", ["recipe", "convert", str(file), "--to", tool, "--model", str(folder), "--json"])
    answer = json.loads(capsys.readouterr().out)
    left = [each for each in answer["left_out"] if "don't reach the draft head (MTP)" in each["why"]]
    assert left
    assert all(name.startswith(head_of(kind)) for each in left for name in each["tensors"])
    assert head_of(kind) not in json.dumps(answer["patterns"])


def test_rule_for_the_head_alone_is_refused_in_a_search(kind: str, folder: Path) -> None:
    session = de.open(str(folder))
    session.scan(["bfloat16", "int8"])
    only = ((head_of(kind), ("int8",)),)
    with pytest.raises(UserError, match=r"selects only the draft head \(MTP\), which a search leaves as stored"):
        session.search(budget=10**6, constraints=Constraints(only=only, formats="own"))


def test_rounding_of_the_head_gains_nothing(kind: str, folder: Path, head: Tensors) -> None:
    name = next(name for name, each in head.items() if each.ndim == 2)
    with pytest.raises(UserError, match=r"is in the draft head \(MTP\): no forward pass uses it"):
        de.open(str(folder)).rounding_gains({name: ["int8"]})


def test_values_of_the_head_are_compared_after_a_cast(
    kind: str, folder: Path, head: Tensors, capsys: pytest.CaptureFixture[str]
) -> None:
    report = json.loads(command(capsys, "weights", folder, "--cast", f"{head_of(kind)}=float16", "--json"))
    assert {each["name"] for each in report["weights"]} == set(head)
    for each in report["weights"]:
        weight = head[each["name"]]
        largest = float((weight - weight.half().float()).abs().max())
        assert each["max_abs"] == pytest.approx(largest, rel=1e-6)
