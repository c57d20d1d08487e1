"""Experts that transformers packs as it loads them, exported with scales: an expert's tensors under its name in the files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.candidate_output import candidate_output
from tests.helpers.exporting import export_checkpoint, read
from torch import nn

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.source import locate
from dtype_engine.checkpoint.weight_sets import NAMED_WEIGHTS, NO_WEIGHTS
from dtype_engine.core.errors import UserError
from dtype_engine.runtime.modes.candidate import candidate_value
from dtype_engine.runtime.modes.reference import reference_value
from dtype_engine.runtime.session.verify import verify

SMALL = {
    "vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": False, "num_experts_per_tok": 2,
}  # fmt: skip
IDS = torch.arange(2, 30)[None]
EXPERTS = {"mixtral": "block_sparse_moe.experts", "qwen": "mlp.experts"}
PACKED = {"gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")), "down_proj": (("down_proj", "w2"),)}
FORMATS = (
    "float8_e4m3fn", "float8_e4m3fn@tensor", "int8", "int8@tensor", "mxfp8", "mxfp4", "mxfp4:rceil", "nvfp4", "fp8@128x128",
    "fp8@128x128:ue8m0", "int4@g128", "int4@g32", "int4@g128a", "int8@g128",
)  # fmt: skip

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
LOADED = {"float8_e4m3fn": 0.0, "float8_e4m3fn@tensor": 0.0, "mxfp4": 0.0, "int4@g128": 2**-8, "int8@g128": 2**-8}
"""The formats in which transformers reads packed experts, with the relative rounding that this may add."""


def in_turn(formats: Iterable[str], first: int = 0) -> pytest.MarkDecorator:
    """Pair each format with one of the two kinds of models in turn, so that related formats are tested with both."""
    kinds = list(EXPERTS)
    pairs = [(kinds[(first + FORMATS.index(dtype)) % 2], dtype) for dtype in formats]
    return pytest.mark.parametrize(("source", "dtype"), pairs, indirect=["source"])


def saved(kind: str, folder: Path, width: int = 256, count: int = 11) -> Path:
    """A small model with experts of `width` rows whose sizes differ, more than ten: their names are in another order as text."""
    import transformers

    torch.manual_seed(0)
    if kind == "mixtral":
        config: Any = transformers.MixtralConfig(intermediate_size=width, num_local_experts=count, **SMALL)
        model: Any = transformers.MixtralForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(
            intermediate_size=width, moe_intermediate_size=width, num_experts=count, head_dim=32, **SMALL
        )
        model = transformers.Qwen3MoeForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(torch.rand(len(parameter), *[1] * (parameter.ndim - 1)) * 2 + 0.5)
    model.float().save_pretrained(folder)
    if not any(".experts.0." in name for name in load_file(folder / "model.safetensors")):
        pytest.skip("this transformers stores experts packed")
    return folder


@pytest.fixture(scope="module", params=EXPERTS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, saved(request.param, tmp_path_factory.mktemp(request.param) / "source")


def opened(source: Path, settings: de.RunSettings | None = None) -> de.Session:
    options = de.Options(device="cpu", settings=settings or de.RunSettings())
    return de.open(str(source), options=options, inputs=[{"input_ids": IDS}])


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def by_hand(folder: Path) -> dict[str, torch.Tensor]:
    """The values in an export's file in float32, under the names of the checkpoint, by the definitions of its formats."""
    tensors = load_file(folder / "model.safetensors")
    found = {}
    for name, tensor in tensors.items():
        if "weight" not in name or name.endswith(("_packed", ".weight")):
            weight = name.removesuffix("_packed")
            parts = {key.removeprefix(weight): value for key, value in tensors.items() if key.startswith(weight + "_")}
            found[weight] = decoded(tensor, parts)
    return found


def decoded(codes: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    scale = parts.get("_scale", parts.get("_scale_inv"))
    if scale is None:
        return codes.float()
    if "_shape" in parts:
        bits = 32 * codes.shape[1] // int(parts["_shape"][1])
        values = _words(codes, bits).float() - 2 ** (bits - 1)
        if "_zero_point" in parts:
            zero = _words(parts["_zero_point"].t(), bits).t()[: len(codes)].float() - 2 ** (bits - 1)
            values -= zero.repeat_interleave(values.shape[1] // zero.shape[1], 1)
    elif codes.dtype == torch.uint8:
        values = E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()]
    else:
        values = codes.float()
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scale = torch.pow(2.0, scale.view(torch.uint8).double() - 127).float()
    scale = scale.float().reshape(-1, 1) if scale.ndim == 1 else scale.float()
    if "_global_scale" in parts:
        scale = scale / parts["_global_scale"]
    down, across = values.shape[0] // scale.shape[0], values.shape[1] // scale.shape[1]
    return values * scale.repeat_interleave(down, 0).repeat_interleave(across, 1)


def _words(words: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = torch.arange(0, 32, bits)
    return ((words.long()[:, :, None] & 0xFFFFFFFF) >> shifts & (2**bits - 1)).flatten(1)


def plain(state: dict[str, torch.Tensor], source: Path, folder: Path) -> nn.Module:
    """A model of these float32 values by transformers' own loading, with the configuration of the source."""
    import transformers

    folder.mkdir()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


@in_turn(FORMATS)
def test_exported_experts_give_the_output_that_was_measured(
    dtype: str, source: tuple[str, Path], tmp_path: Path
) -> None:
    _, folder = source
    out = tmp_path / "out"
    session = opened(folder)
    session.cast("*.experts", dtype)
    measured = candidate_output(session)
    contents = session.export_contents()
    report = session.export(out)
    tensors = load_file(out / "model.safetensors")
    assert report.nbytes == contents.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    state = by_hand(out)
    assert state.keys() == load_file(folder / "model.safetensors").keys()
    with torch.no_grad():
        theirs = plain(state, folder, tmp_path / "plain")(IDS).logits
        assert torch.equal(theirs, de.load_pretrained(out)(IDS).logits)
    assert float((theirs - measured).abs().max()) <= 1e-6 * float(measured.abs().max())

    assert verify(out, locate(str(folder))).same
    again = opened(out)
    assert torch.equal(candidate_output(again), measured)
    assert not any("not used" in notice or "at random" in notice for notice in again.model.notices)
    for name, weight in session.model.weights.items():
        other = again.model.weights[name]
        assert weight.dtype == other.dtype
        assert torch.equal(candidate_value(weight, torch.float32), candidate_value(other, torch.float32))
    again.export(tmp_path / "again")
    assert config_of(tmp_path / "again") == config_of(out)
    copied = load_file(tmp_path / "again" / "model.safetensors")
    assert copied.keys() == tensors.keys()
    assert all(torch.equal(copied[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in tensors)
    assert verify(tmp_path / "again", locate(str(out))).same


@in_turn(FORMATS, 1)
def test_exported_config_targets_every_expert(dtype: str, source: tuple[str, Path], tmp_path: Path) -> None:
    kind, folder = source
    out = tmp_path / "out"
    contents = export_checkpoint(open_checkpoint(folder), "moe", Recipe((Rule("*.experts", dtype),)), out)
    layer = f"model.layers.0.{EXPERTS[kind]}"
    modules = [name.removesuffix(".weight") for name in by_hand(out) if ".experts." in name]
    assert len(modules) == 33
    config = config_of(out)
    if dtype.endswith("ue8m0"):
        assert not any("experts" in name for name in config["modules_to_not_convert"])
        return
    (group,) = config["config_groups"].values()
    (target,) = group["targets"]
    assert all(re.match(target.removeprefix("re:"), module) for module in modules)
    # What vLLM asks for, whatever the projections are called.
    assert re.match(target.removeprefix("re:"), f"{layer}.0.gate_proj")
    assert not re.match(target.removeprefix("re:"), f"model.layers.0.{EXPERTS[kind]}")
    assert "model.layers.0.self_attn.q_proj" in config["ignore"]
    assert not any("experts" in name for name in config["ignore"])
    assert contents.notices == () or "transformers 5 does not read them" in contents.notices[0]


def test_nvfp4_gate_and_up_of_an_expert_share_a_scale_and_fp8_do_not(source: tuple[str, Path], tmp_path: Path) -> None:
    kind, folder = source
    recipe = Recipe((Rule("*.experts.gate_up_proj", "nvfp4"), Rule("*.experts.down_proj", "float8_e4m3fn")))
    export_checkpoint(open_checkpoint(folder), "moe", recipe, tmp_path / "out")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    layer, mixtral = f"model.layers.0.{EXPERTS[kind]}", kind == "mixtral"
    gates = [f"{layer}.{expert}.{names[mixtral]}.weight" for expert in range(11) for names in PACKED["gate_up_proj"]]
    largest = max(float(before[name].abs().max()) for name in gates)
    for name in gates:
        assert float(after[f"{name}_global_scale"]) == pytest.approx(448 * 6 / largest, rel=1e-6)
    for expert in range(11):
        name = f"{layer}.{expert}.{PACKED['down_proj'][0][mixtral]}.weight"
        assert torch.equal(after[f"{name}_scale"], (before[name].abs().max() / 448).expand(128, 1))


@in_turn(["nvfp4", "float8_e4m3fn", "float8_e4m3fn@tensor", "mxfp4", "fp8@128x128", "int4@g32"])
def test_verify_finds_one_changed_byte_of_an_expert(dtype: str, source: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = source
    out = tmp_path / "out"
    export_checkpoint(open_checkpoint(folder), "moe", Recipe((Rule("*.experts", dtype),)), out)
    file = out / "model.safetensors"
    written, metadata = read(file)
    changed = [name for name in written if ".experts.7." in name and "_shape" not in name]
    of_weights: dict[str, list[str]] = {}
    for name in changed:
        of_weights.setdefault(re.sub(r"_(packed|scale|global_scale)$", "", name), []).append(name)
    tried = set()
    for turn in range(len(changed) // 3):  # a tensor of each of the expert's weights, not the same part of all
        flipped = {
            weight: parts[(turn + place) % len(parts)] for place, (weight, parts) in enumerate(of_weights.items())
        }
        tensors = {other: tensor.clone() for other, tensor in written.items()}
        for name in flipped.values():
            tensors[name].view(torch.uint8).view(-1)[-1] ^= 1
        save_file(tensors, file, metadata)
        differences = verify(out, locate(str(folder))).differences
        assert sorted(difference.name for difference in differences) == sorted(flipped)
        for difference in differences:
            name = flipped[difference.name]
            assert f"1 of {written[name].numel()} values of {name} differ" in difference.what
        tried |= set(flipped.values())
    assert tried == set(changed)
    assert len(of_weights) == 3
    assert len(changed) == {"nvfp4": 9}.get(dtype, 6)


@in_turn(LOADED)
def test_transformers_loads_exported_experts_of_supported_formats(
    dtype: str, source: tuple[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", "0.20")
    import transformers

    _, folder = source
    out = tmp_path / "out"
    report = export_checkpoint(open_checkpoint(folder), "moe", Recipe((Rule("*.experts", dtype),)), out)
    assert not any("transformers" in notice for notice in report.notices)
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    for more in ({}, {"quantization_config": settings}):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out, **more)
        ours = dict(de.load_pretrained(out).named_parameters())
        for name, parameter in theirs.named_parameters():
            if ".experts." in name:
                difference = (parameter.float() - ours[name].float()).abs()
                assert bool((difference <= LOADED[dtype] * ours[name].float().abs()).all()), name


@in_turn(name for name in FORMATS if name not in (*LOADED, "mxfp4:rceil", "int4@g32"))
def test_export_gives_a_notice_about_expert_formats_that_transformers_cannot_load(
    dtype: str, source: tuple[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", "0.20")
    import transformers

    _, folder = source
    out = tmp_path / "out"
    report = export_checkpoint(open_checkpoint(folder), "moe", Recipe((Rule("*.experts", dtype),)), out)
    readme = (out / "README.md").read_text()
    if dtype.endswith("ue8m0"):
        assert "reads it where the accelerate package is installed" in readme
        return
    assert any("from_pretrained of transformers 5 does not read them" in notice for notice in report.notices)
    assert "does not read it: it " in readme
    with pytest.raises(FileNotFoundError, match=NO_WEIGHTS):
        transformers.AutoModelForCausalLM.from_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    assert config.pop(NAMED_WEIGHTS) == NO_WEIGHTS
    (out / "config.json").write_text(json.dumps(config))
    if dtype == "nvfp4":
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
        name = "model.layers.0.mlp.experts.down_proj"
        ours = de.load_pretrained(out).get_parameter(name).detach().float()
        assert float((theirs.get_parameter(name).detach().float() - ours).abs().max()) > 100 * float(ours.abs().max())
        return
    with pytest.raises(RuntimeError, match="automatic conversion of the weights"):
        transformers.AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.parametrize("dtype", ["int4@g32", "float8_e4m3fn", "nvfp4"])
def test_compressed_tensors_experts_are_decoded_in_float32(dtype: str, tmp_path: Path) -> None:
    """Without its own metadata an export is any checkpoint of compressed-tensors."""
    folder, out = saved("qwen", tmp_path / "source", width=32, count=11), tmp_path / "out"
    export_checkpoint(open_checkpoint(folder), "moe", Recipe((Rule("*.experts", dtype),)), out)
    save_file(load_file(out / "model.safetensors"), out / "model.safetensors", {"format": "pt"})
    session, values = opened(out), by_hand(out)
    for packed, parts in PACKED.items():
        weight = session.model.weights[f"model.layers.0.mlp.experts.{packed}"]
        expected = torch.stack(
            [
                torch.cat([values[f"model.layers.0.mlp.experts.{index}.{name}.weight"] for name, _ in parts])
                for index in range(11)
            ]
        )
        assert weight.decoded
        assert torch.equal(reference_value(weight, torch.device("cpu")), expected)
        session.cast(f"*.experts.{packed}", "float16")
        assert torch.equal(weight.tensor, expected.half())


def test_export_refuses_blocks_that_span_two_packed_weights(tmp_path: Path) -> None:
    source = open_checkpoint(saved("qwen", tmp_path / "source", width=192, count=3))
    for dtype in ("fp8@128x128", "fp8@128x128:ue8m0"):
        recipe = Recipe((Rule("*.experts.gate_up_proj", dtype),))
        with pytest.raises(UserError, match=r"experts.0.gate_proj.weight has 192 rows, no multiple of 128") as refused:
            export_checkpoint(source, "moe", recipe, tmp_path / "out")
        assert "mlp.experts.gate_up_proj is packed of several tensors" in str(refused.value)
    out = tmp_path / "out"
    export_checkpoint(source, "moe", Recipe((Rule("*.experts.down_proj", "fp8@128x128"),)), out)
    assert verify(out, locate(str(tmp_path / "source"))).same
    session = opened(tmp_path / "source")
    session.cast("*.experts.down_proj", "fp8@128x128")
    assert torch.equal(candidate_output(opened(out)), candidate_output(session))


def test_export_refuses_experts_with_rows_shorter_than_a_block(tmp_path: Path) -> None:
    source = open_checkpoint(saved("mixtral", tmp_path / "source", width=64, count=3))
    recipe = Recipe((Rule("*.experts.down_proj", "int4@g128"),))
    with pytest.raises(UserError, match="rows have 64 values, fewer than a block"):
        export_checkpoint(source, "moe", recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_refuses_experts_that_are_transposed_while_packing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

    source = open_checkpoint(saved("qwen", tmp_path / "source", width=128, count=2))
    turned = WeightConverter(
        ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
        "mlp.experts.gate_up_proj",
        [MergeModulelist(0), Concatenate(1), Transpose(1, 2)],
    )
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda module: [turned])
    with pytest.raises(UserError, match=r"gate_up_proj is packed .* does not stack its parts one below the other"):
        export_checkpoint(source, "moe", Recipe((Rule("*.gate_up_proj", "mxfp4"),)), tmp_path / "out")


@pytest.mark.parametrize("dtype", ["mxfp8", "fp8@128x128:ue8m0"])
def test_exported_config_lists_uncast_experts_as_ignored(dtype: str, source: tuple[str, Path], tmp_path: Path) -> None:
    kind, folder = source
    recipe = Recipe((Rule("*.q_proj", dtype), Rule("*.k_proj", dtype), Rule("*.v_proj", dtype)))
    export_checkpoint(open_checkpoint(folder), "moe", recipe, tmp_path / "out")
    config, layer = config_of(tmp_path / "out"), f"model.layers.0.{EXPERTS[kind]}"
    if dtype == "mxfp8":
        (expression,) = [name for name in config["ignore"] if "experts" in name]
        assert re.match(expression.removeprefix("re:"), f"{layer}.10.up_proj")
    else:
        assert layer in config["modules_to_not_convert"]


def test_expert_projections_in_two_formats_are_separate_config_groups(source: tuple[str, Path], tmp_path: Path) -> None:
    kind, folder = source
    recipe = Recipe((Rule("*.experts.gate_up_proj", "nvfp4"), Rule("*.experts.down_proj", "mxfp8")))
    report = export_checkpoint(open_checkpoint(folder), "moe", recipe, tmp_path / "out")
    groups = config_of(tmp_path / "out")["config_groups"].values()
    assert sorted(len(group["targets"]) for group in groups) == [11, 22]
    assert all(f"model.layers.0.{EXPERTS[kind]}." in target for group in groups for target in group["targets"])
    assert any("vLLM needs one format for all experts of a layer" in notice for notice in report.notices)
    assert verify(tmp_path / "out", locate(str(folder))).same


def test_quantized_activations_of_experts_are_declared_only_without_stored_scales(
    source: tuple[str, Path], tmp_path: Path
) -> None:
    _, folder = source
    session = opened(folder, de.RunSettings(quantize_activations="weights"))
    session.cast("*.experts", "mxfp4")
    session.export(tmp_path / "mxfp4")
    (group,) = config_of(tmp_path / "mxfp4")["config_groups"].values()
    assert group["input_activations"]["group_size"] == 32
    again = opened(tmp_path / "mxfp4", de.RunSettings(quantize_activations="weights"))
    assert torch.equal(candidate_output(again), candidate_output(session))
    again.settings = de.RunSettings()
    again.export(tmp_path / "again")
    assert config_of(tmp_path / "again") == config_of(tmp_path / "mxfp4")

    session.cast("*.experts", "nvfp4")
    report = session.export(tmp_path / "nvfp4")
    (group,) = config_of(tmp_path / "nvfp4")["config_groups"].values()
    assert group["input_activations"] is None
    assert any(
        "activations of 33 weights in nvfp4" in notice and "are not quantized" in notice for notice in report.notices
    )
    assert not any("input_global_scale" in name for name in load_file(tmp_path / "nvfp4" / "model.safetensors"))
    assert verify(tmp_path / "nvfp4", locate(str(folder))).same


def test_each_expert_is_decoded_by_the_scales_of_its_own_rows(source: tuple[str, Path], tmp_path: Path) -> None:
    """Scales of its rows, as a program gives them that does not pack experts: one weight has one for each expert."""
    _, folder = source
    out = tmp_path / "out"
    export_checkpoint(open_checkpoint(folder), "moe", Recipe((Rule("*.experts", "int8"),)), out)
    file = out / "model.safetensors"
    tensors, metadata = read(file)
    name = next(name for name in tensors if ".experts.3." in name and name.endswith("_scale"))
    tensors[name][5] *= 2
    save_file(tensors, file, metadata)
    with torch.no_grad():
        theirs = plain(by_hand(out), folder, tmp_path / "plain")(IDS).logits
        assert torch.equal(theirs, de.load_pretrained(out)(IDS).logits)
