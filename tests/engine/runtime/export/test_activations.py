"""Exports of recipes that quantize activations: what is declared, and that others compute what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from safetensors.torch import load_file, save_file
from tests.engine.runtime.export.test_experts import decoded
from tests.helpers.candidate_output import candidate_output
from tests.helpers.exporting import export_checkpoint, read
from torch import nn

import dtype_engine as de
from dtype_engine import Recipe, Rule, RunSettings
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.source import locate
from dtype_engine.cli import cli
from dtype_engine.core.cancellation import never
from dtype_engine.core.errors import UserError
from dtype_engine.runtime.passes.runner import ForwardRunner
from dtype_engine.runtime.session.verify import verify

QUANTISED = RunSettings(quantize_activations="weights")
OPTIONS = de.Options(device="cpu", settings=QUANTISED)
PRESETS = {
    "float8_e4m3fn": "FP8_DYNAMIC",
    "int8": "W8A8",
    "fp8@128x128": "FP8_BLOCK",
    "mxfp8": "MXFP8",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
    "int4@g128": "W4A16",
    "int4@g128a": "W4A16_ASYM",
    "int8@g128": "W8A16",
}
"""compressed-tensors' own scheme for the weights and the inputs of each format."""
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("inputs") / "ids.safetensors"
    save_file({"input_ids": torch.randint(2, 60, (1, 14), generator=torch.Generator().manual_seed(0))}, file)
    return file


def opened(source: Path, ids: Path, dtype: str) -> de.Session:
    session = de.open(str(source), options=de.Options(device="cpu", tensors=ids, settings=QUANTISED))
    session.cast("*_proj", dtype)
    return session


def groups_of(folder: Path) -> dict[str, Any]:
    described: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return described["config_groups"]


def by_transformers(folder: Path) -> nn.Module:
    """Return the export as transformers and compressed-tensors load it, decompressed to float32."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if hasattr(model, "ct_decompress_hook"):
        model.hf_quantizer.compressor.decompress_model(model)
        _widen(model, folder)
    return nn.Module.float(model)


def _widen(model: nn.Module, folder: Path) -> None:
    """Values of 4-bit floats in float32: compressed-tensors unpacks them in bfloat16, which rounds those of NVFP4."""
    tensors = load_file(folder / "model.safetensors")
    for name, packed in tensors.items():
        weight = name.removesuffix("_packed")
        if weight != name and packed.dtype == torch.uint8:
            parts = {key.removeprefix(weight): value for key, value in tensors.items() if key.startswith(f"{weight}_")}
            model.get_submodule(weight.removesuffix(".weight")).weight.data = decoded(packed, parts)


def _as_vllms_int8(layer: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """`dynamic_scaled_int8_quant` of vLLM: compressed-tensors' own emulation divides by 127.5 where that kernel has 127."""
    scale = args[0].abs().amax(-1, keepdim=True) / 127
    return ((args[0] / scale).round() * scale,)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3fn@tensor", "int8", *list(PRESETS)[2:7]])
def test_output_with_quantized_activations_in_transformers_equals_the_measured_output(
    dtype: str, make_llama: Callable[..., Path], ids: Path, tmp_path: Path
) -> None:
    """Weights, scales and the quantizer before each layer are those that transformers makes from the files."""
    source, out = make_llama(dtype="float32", **WIDE), tmp_path / "out"
    session = opened(source, ids, dtype)
    measured = candidate_output(session)
    session.settings = RunSettings()
    weights_only = candidate_output(session)
    session.settings = QUANTISED
    session.export(out)
    assert verify(out, locate(str(source))).same
    loaded = by_transformers(out)
    if dtype == "int8":
        for module in loaded.modules():
            if isinstance(module, nn.Linear) and getattr(module, "quantization_scheme", None) is not None:
                module.quantization_scheme.input_activations = None
                module.register_forward_pre_hook(_as_vllms_int8)
    with torch.no_grad():
        theirs = loaded(**load_file(ids)).logits
    rounding = float(torch.finfo(torch.bfloat16).eps) * float(measured.abs().max())
    assert float((theirs - measured).abs().max()) < 2e-5
    if dtype != "int4@g128":
        assert float((theirs - weights_only).abs().max()) > rounding, "the activations make a difference"


@pytest.mark.parametrize("dtype", PRESETS)
def test_scheme_in_the_exported_config_equals_that_of_compressed_tensors(
    dtype: str, make_llama: Callable[..., Path], ids: Path, tmp_path: Path
) -> None:
    source = make_llama(dtype="bfloat16", **WIDE)
    session = opened(source, ids, dtype)
    session.export(tmp_path / "both")
    session.settings = RunSettings()
    session.export(tmp_path / "weights")
    theirs = preset_name_to_scheme(PRESETS[dtype], ["Linear"])
    ignored = {"observer": True, "zp_dtype": True}
    for folder, inputs in ((tmp_path / "both", theirs.input_activations), (tmp_path / "weights", None)):
        (group,) = groups_of(folder).values()
        ours = QuantizationScheme(**group)
        assert ours.weights is not None
        assert theirs.weights is not None
        for one, other in ((ours.weights, theirs.weights), (ours.input_activations, inputs)):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                kept = one.model_dump(exclude=ignored), other.model_dump(exclude=ignored)
                for each in kept:
                    each["scale_dtype"] = str(each.get("scale_dtype"))
                assert kept[0] == kept[1]
        scales = [name for name in load_file(folder / "model.safetensors") if name.endswith("input_global_scale")]
        assert len(scales) == (14 if dtype == "nvfp4" and inputs is not None else 0)
    assert "settings:" not in (tmp_path / "weights" / "recipe.yaml").read_text()
    assert "quantize_activations: weights" in (tmp_path / "both" / "recipe.yaml").read_text()


def test_nvfp4_input_scale_is_shared_by_fused_layers(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    """The largest inputs are those that hooks see in plain torch for two sequences."""
    source = make_llama(dtype="float32", **WIDE)
    given = [{"input_ids": torch.arange(2, 2 + length)[None]} for length in (5, 9)]
    session = de.open(str(source), options=OPTIONS, inputs=given)
    session.cast("*_proj", "nvfp4")
    session.export(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    seen: dict[str, float] = {}
    for name, module in session.model.module.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(
                lambda module, args, name=name: seen.update(
                    {name: max(seen.get(name, 0.0), float(args[0].abs().max()))}
                )
            )
    for batch in session.need_inputs().batches:
        with ForwardRunner(session.model, QUANTISED, never, watch=False) as runner:
            runner.candidate(runner.candidate_call(batch))
    assert len(session.need_inputs().batches) == 2
    for name, largest in seen.items():
        assert float(written[f"{name}.input_global_scale"]) == pytest.approx(448 * 6 / largest, rel=1e-6)
    layer = "model.layers.0.self_attn"
    assert len({float(written[f"{layer}.{part}_proj.input_global_scale"]) for part in "qkv"}) == 1


def test_nvfp4_export_with_activations_requires_calibration_inputs(
    make_llama: Callable[..., Path], ids: Path, tmp_path: Path
) -> None:
    source, out = make_llama(dtype="bfloat16", **WIDE), tmp_path / "out"
    recipe = Recipe((Rule.parse("*_proj=nvfp4"),))
    with pytest.raises(UserError, match="comes from calibration inputs"):
        export_checkpoint(open_checkpoint(source), "source", recipe, out, options=OPTIONS)
    assert not out.exists()
    asked = ["export", str(source), "-o", str(out), "--cast", "*_proj=nvfp4", "--inputs", str(ids), "--device", "cpu"]
    found = CliRunner().invoke(cli, [*asked, "--quantize-activations", "weights"])
    assert found.exit_code == 0, found.output
    (group,) = groups_of(out).values()
    assert group["input_activations"]["dynamic"] == "local"
    report = verify(out, locate(str(source)))
    assert report.same
    assert any("14 scales of activations come from calibration inputs" in sentence for sentence in report.unchecked)
    file = out / "model.safetensors"
    tensors, metadata = read(file)
    tensors["model.layers.1.mlp.up_proj.input_global_scale"].fill_(torch.inf)
    save_file(tensors, file, metadata)
    (difference,) = verify(out, locate(str(source))).differences
    assert difference.name == "model.layers.1.mlp.up_proj.weight"


def test_export_of_an_export_still_declares_quantized_activations(
    make_llama: Callable[..., Path], ids: Path, tmp_path: Path
) -> None:
    """The scale tensors of an export are not taken for weights, and a second export has them again."""
    source, one, two = make_llama(dtype="bfloat16", **WIDE), tmp_path / "one", tmp_path / "two"
    session = opened(source, ids, "nvfp4")
    session.cast("*.mlp", "mxfp8")
    session.export(one)
    checkpoint = open_checkpoint(one)
    assert not any("scale" in name for name in checkpoint.weights)
    assert not any("not used" in notice for notice in de.open(str(one)).model.notices)
    export_checkpoint(checkpoint, "one", Recipe((Rule.parse("*norm=float32"),)), two)
    assert verify(two, locate(str(one))).same
    assert {tuple(sorted(group["input_activations"].items())) for group in groups_of(one).values()} == {
        tuple(sorted(group["input_activations"].items())) for group in groups_of(two).values()
    }
    before, after = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert before.keys() == after.keys()
    name = "model.layers.1.self_attn.k_proj.input_global_scale"
    assert torch.equal(before[name], after[name])


def test_input_scales_are_calibrated_with_kv_caches_rounded_as_well(
    make_llama: Callable[..., Path], ids: Path, tmp_path: Path
) -> None:
    """The recipe's caches are rounded while the inputs are observed, as in the candidate, so later layers get other inputs."""
    source = make_llama(dtype="bfloat16", **WIDE)
    scales = []
    for cache in (None, "int4@token"):
        session = opened(source, ids, "nvfp4")
        if cache is not None:
            session.cast("*.kv_cache", cache)
        session.export(tmp_path / str(cache))
        tensors = load_file(tmp_path / str(cache) / "model.safetensors")
        scales.append([tensors[f"model.layers.{n}.mlp.down_proj.input_global_scale"].item() for n in range(2)])
    assert scales[0] != scales[1]
    kept: list[float] = []
    layer = session.model.module.get_submodule("model.layers.1.mlp.down_proj")
    with ForwardRunner(session.model, session.settings, never) as runner:
        hook = layer.register_forward_pre_hook(lambda _, given: kept.append(given[0].abs().max().item()))
        runner.candidate(runner.candidate_call(session.need_inputs().batches[0]))
        hook.remove()
    assert scales[1][1] == pytest.approx(6 * 448 / kept[0], rel=1e-6)


def test_export_gives_a_notice_about_activations_that_other_programs_quantize_differently(
    make_llama: Callable[..., Path], ids: Path, tmp_path: Path
) -> None:
    source = make_llama(dtype="bfloat16", **WIDE)
    session = opened(source, ids, "mxfp4:floor")
    session.cast("*.mlp", "int4@g128")
    notices = " ".join(session.export(tmp_path / "out").notices)
    assert "activations of weights in mxfp4:floor were measured with that rule" in notices
    assert "activations of weights in int4@g128 are not quantized" in notices
    session.settings = RunSettings()
    assert not any("activations" in notice for notice in session.export_contents().notices)
