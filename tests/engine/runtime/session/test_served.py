"""What is measured as a runtime serves it: against plain torch and transformers, with the runtimes' formulas written again here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tests.helpers import paths
from tests.helpers.candidate_output import candidate_output
from torch import nn

import dtype_engine as de
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.errors import UserError
from dtype_engine.runtime.formats.dequantize import dequantize

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",), ("down_proj",))
"""The linear layers of a decoder, by the layers of vLLM."""


def fp8(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def in_blocks(values: torch.Tensor, rows: int, columns: int, scaled: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Apply `scaled` to [blocks down, rows, blocks across, columns]."""
    height, width = values.shape
    blocks = values.float().reshape(height // rows, rows, width // columns, columns)
    return scaled(blocks).reshape(height, width)


def per_tensor(fused: torch.Tensor) -> torch.Tensor:
    return fp8(fused, fused.float().abs().max() / 448)


def per_row(values: torch.Tensor) -> torch.Tensor:
    return fp8(values, values.float().abs().amax(dim=-1, keepdim=True) / 448)


def per_block(rows: int, values: torch.Tensor) -> torch.Tensor:
    return in_blocks(values, rows, 128, lambda x: fp8(x, x.abs().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448))


def mxfp8(values: torch.Tensor) -> torch.Tensor:
    """`_mxfp8_e4m3_quantize_torch`: the exponent of amax / 448, rounded up."""

    def scaled(blocks: torch.Tensor) -> torch.Tensor:
        scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(dim=(1, 3), keepdim=True) / 448)))
        return fp8(blocks, scale)

    return in_blocks(values, 1, 32, scaled)


def mxfp4(values: torch.Tensor) -> torch.Tensor:
    """`_compute_quant_and_scale`: the mantissa of amax is rounded to one bit, and its exponent less 2 is that of the scale."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def scaled(blocks: torch.Tensor) -> torch.Tensor:
        amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
        rounded = ((amax.view(torch.int32) + 0x200000) & 0x7F800000).view(torch.float32)
        scale = rounded / 4
        units = (blocks / scale).abs()
        below = torch.bucketize(units, (grid[1:] + grid[:-1]) / 2)  # the lower one of a tie
        tie = (units == torch.cat([(grid[1:] + grid[:-1]) / 2, torch.tensor([9.0])])[below]) & (below % 2 == 1)
        return torch.sign(blocks) * grid[below + tie.int()] * scale

    return in_blocks(values, 1, 32, scaled)


Rounded = Callable[[torch.Tensor], torch.Tensor]
SCHEMES: dict[tuple[str, str], tuple[str, Rounded, Rounded]] = {
    ("vllm", "fp8_per_tensor"): ("fp8@tensor", per_tensor, per_row),
    ("vllm", "fp8_per_channel"): ("fp8", per_row, per_row),
    ("vllm", "fp8_per_block"): ("fp8@128x128", lambda w: per_block(128, w), lambda x: per_block(1, x)),
    ("vllm", "mxfp8"): ("mxfp8", mxfp8, mxfp8),
    ("vllm", "mxfp4"): ("mxfp4", mxfp4, mxfp4),
    ("sglang", "fp8"): ("fp8@tensor", per_row, per_row),
    ("sglang", "mxfp8"): ("mxfp8:rceil", mxfp8, mxfp8),
}
"""For each scheme: the format of the recipe, and how the runtime rounds the weights of a fused layer, and their inputs."""


TITLES = {"vllm": "vLLM", "sglang": "SGLang"}


def llama_folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.ndim == 2:  # rows and weights of very different sizes, so that the scales matter
                parameter.mul_(torch.logspace(-1, 1, len(parameter))[:, None] * (1 + number % 3))
    model.bfloat16().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def layers_of(model: nn.Module) -> list[list[nn.Linear]]:
    """The linear layers that vLLM fuses, without the output layer."""
    found = []
    for layer in model.model.layers:  # type: ignore[union-attr]
        named = dict(layer.named_modules())
        ends = {name.rpartition(".")[2]: module for name, module in named.items() if isinstance(module, nn.Linear)}
        found += [[ends[name] for name in group] for group in FUSED]
    return found


def round_inputs(rounded: Rounded) -> Callable[[nn.Module, tuple[torch.Tensor]], torch.Tensor]:
    def hook(module: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
        (values,) = args
        return rounded(values.reshape(-1, values.shape[-1])).to(values.dtype).reshape(values.shape)

    return hook


@pytest.mark.parametrize(("runtime", "scheme"), SCHEMES)
def test_dense_model_is_measured_as_the_runtime_computes_it(runtime: str, scheme: str, tmp_path: Path) -> None:
    form, of_weights, of_inputs = SCHEMES[runtime, scheme]
    folder = llama_folder(tmp_path)
    ids = torch.randint(3, 96, (1, 24), generator=torch.Generator().manual_seed(0))
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    for group in layers_of(plain):
        fused = of_weights(torch.cat([module.weight.data for module in group]))
        for module, values in zip(group, fused.split([len(module.weight) for module in group]), strict=True):
            module.weight.data = values.bfloat16()
            module.register_forward_pre_hook(round_inputs(of_inputs))
    session = de.open(str(folder), options=de.Options(device="cpu"), inputs={"input_ids": ids})
    session.cast("type:Linear", form)
    found = session.served_by(runtime)
    if runtime == "vllm":
        assert {name for _, name in found.conversion.patterns} == {scheme}
    else:
        assert found.conversion.text.endswith(f" --quantization {scheme}\n")
    session.apply(found.recipe)
    session.settings = replace(session.settings, quantize_activations=found.quantize_activations)
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
    assert torch.equal(candidate_output(session), expected)
    assert session.plan.dtypes["lm_head.weight"] == "bfloat16"
    heads = [entry for entry in found.conversion.left_out if "lm_head.weight" in entry.tensors]
    assert [entry.why for entry in heads] == [f"{TITLES[runtime]} leaves output layers wide"]


def of_experts(experts: torch.Tensor, scheme: str) -> torch.Tensor:
    """Round stacked experts [experts, outputs, inputs] by the runtimes' loops over experts."""
    if scheme in ("fp8_per_tensor", "fp8"):
        return torch.stack([per_tensor(expert) for expert in experts])
    if scheme == "fp8_per_channel":
        return torch.stack([per_row(expert) for expert in experts])
    scale = experts.float().abs().amax(dim=2, keepdim=True) / 127
    return (experts.float() / scale).round().clamp(-127, 127) * scale


@pytest.mark.parametrize(
    ("runtime", "form", "scheme", "other"),
    [
        ("vllm", "fp8", "fp8_per_tensor", False),
        ("vllm", "fp8@tensor", "fp8_per_tensor", True),
        ("vllm", "fp8@row", "fp8_per_channel", False),
        ("vllm", "int8@row", "int8_per_channel_weight_only", False),
        ("vllm", "int8", "int8_per_channel_weight_only", True),
        ("sglang", "fp8", "fp8", False),
        ("sglang", "fp8@row", "fp8", True),
    ],
)
def test_experts_have_the_scales_that_the_runtime_gives_them(
    runtime: str, form: str, scheme: str, other: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    made = transformers.MixtralForCausalLM(config).bfloat16()
    made.save_pretrained(tmp_path / "mixtral")
    ids = torch.randint(3, 96, (1, 24), generator=torch.Generator().manual_seed(0))
    session = de.open(str(tmp_path / "mixtral"), options=de.Options(device="cpu"), inputs={"input_ids": ids})
    session.cast("*.experts", form)
    found = session.served_by(runtime)
    if runtime == "vllm":
        assert found.conversion.patterns == ((r"re:model\.layers\.0\.block_sparse_moe\.experts$", scheme),)
    else:
        assert found.conversion.patterns == (("model.layers.0.self_attn", "bfloat16"),)
    assert [entry.part for entry in found.conversion.left_out] == (["scale"] if other else [])
    assert found.quantize_activations == ("none" if form.startswith("int8") else "weights")
    session.apply(found.recipe)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mixtral", dtype=torch.bfloat16).eval()
    experts = plain.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name)
        weight.data = of_experts(weight.data, scheme).bfloat16()
        codes, scale = session.model.weights[f"model.layers.0.mlp.experts.{name}"].current()
        assert scale is not None
        assert torch.equal(dequantize(codes, scale, torch.bfloat16), weight.data)
    with torch.no_grad():
        expected = plain(input_ids=ids).logits.float()
    error = (candidate_output(session).float() - expected).norm() / expected.norm()
    assert error < 4e-3, "another kernel adds up the products of experts"


def test_only_runtimes_that_quantize_while_they_load_are_known() -> None:
    session = de.open(options=de.Options(device="cpu"))
    with pytest.raises(UserError, match="not known what 'torchao' computes with: use vllm or sglang"):
        session.served_by("torchao")


def test_formats_of_kv_caches_become_options_and_stay_in_the_recipe() -> None:
    session = de.open(options=de.Options(device="cpu"))
    session.apply(de.Recipe.of(map(de.Rule.parse, ("*=bf16", "*.mlp=mxfp4", "*.kv_cache=fp8"))))
    found = session.served_by("vllm")
    assert found.conversion.notes[0].endswith(" --kv-cache-dtype fp8")
    caches = session.plan.caches
    session.apply(found.recipe)
    assert session.plan.caches == caches
    session.apply(de.Recipe.of(map(de.Rule.parse, ("*=bf16", "*.mlp=mxfp4", "*.kv_cache.k=fp8"))))
    found = session.served_by("vllm")
    (left,) = found.conversion.left_out
    assert left.why == "vLLM has one format for the keys and the values of a layer"
    assert "--kv-cache-dtype" not in found.conversion.notes[0]
    session.apply(found.recipe)
    assert session.plan.caches == {}


def test_sglang_gets_its_own_options_of_kv_caches() -> None:
    session = de.open(options=de.Options(device="cpu"))
    session.apply(de.Recipe.of(map(de.Rule.parse, ("*=bf16", "*.mlp=fp8", "*.kv_cache=fp8"))))
    found = session.served_by("sglang")
    assert found.conversion.text.endswith(" --quantization fp8 --kv-cache-dtype fp8_e4m3\n")
    session.apply(de.Recipe.of(map(de.Rule.parse, ("*=bf16", "*.mlp=fp8", "*.layers.0.*.kv_cache=fp8"))))
    found = session.served_by("sglang")
    (left,) = found.conversion.left_out
    assert left.why == "SGLang has one format for all layers"
    assert "--kv-cache-dtype" not in found.conversion.text


def test_drift_command_as_sglang_measures_the_one_scheme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(llama_folder(tmp_path))
    rules = ["--cast", "*.mlp=fp8@tensor", "--cast", "*.o_proj=mxfp8"]
    assert run(cli, "dtype-engine", ["drift", folder, *rules, "--sequences", "1", "--as", "sglang", "--json"]) == 0
    served = json.loads(capsys.readouterr().out)["served"]
    assert served["conversion"]["text"].startswith(
        "SGLANG_FP8_IGNORED_LAYERS=self_attn python -m sglang.launch_server "
    )
    (mlp,) = (rule for rule in served["recipe"]["rules"] if "float8" in str(rule))
    assert "self_attn" not in str(mlp)
    assert served["quantize_activations"] == "weights"


def test_drift_command_measures_and_names_what_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(llama_folder(tmp_path))
    arguments = [
        "drift",
        folder,
        "--cast",
        "*.mlp=fp8@tensor",
        "--cast",
        "*.q_proj=fp8",
        "--sequences",
        "1",
        "--as",
        "vllm",
    ]
    assert run(cli, "dtype-engine", [*arguments, "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["settings"] == "activations quantized as their weights"
    assert found["served"]["quantize_activations"] == "weights"
    assert {pattern[1] for pattern in found["served"]["conversion"]["patterns"]} == {"fp8_per_tensor"}
    (alone,) = (entry for entry in found["served"]["conversion"]["left_out"] if entry["part"] == "dtype")
    assert alone["why"] == "vLLM has one scheme for q_proj, k_proj, v_proj, which it fuses"
    assert run(cli, "dtype-engine", [*arguments, "--quantize-activations", "none"]) == 0
    said = capsys.readouterr()
    assert "vllm serve MODEL --dtype bfloat16 --quantization online --quantization-config '{" in said.err
    assert "activations quantized" not in said.out
    assert run(cli, "dtype-engine", ["drift", str(paths.DEMO), "--as", "tgi"]) == 2
