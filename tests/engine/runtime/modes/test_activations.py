"""Activations quantized as their weights: against compressed-tensors' own quantizer, and what vLLM's kernels compute."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam
from tests.helpers import architectures
from torch import nn

import dtype_engine as de
from dtype_engine import RunSettings
from dtype_engine.core import dtypes
from dtype_engine.core.cancellation import never
from dtype_engine.runtime.formats.dequantize import dequantize
from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.numerics.activations import quantize_activations
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner

QUANTISED = RunSettings(quantize_activations="weights")
_GROUP = {"type": "float", "symmetric": True, "strategy": "group", "dynamic": True}
THEIRS: dict[str, dict[str, Any]] = {
    "float8_e4m3fn": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
    "float8_e4m3fn@tensor": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
    "fp8@128x128": _GROUP | {"num_bits": 8, "group_size": 128},
    "mxfp8": _GROUP | {"num_bits": 8, "group_size": 32, "scale_dtype": torch.uint8},
    "mxfp4": _GROUP | {"num_bits": 4, "group_size": 32, "scale_dtype": torch.uint8},
    "nvfp4": _GROUP
    | {
        "num_bits": 4,
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": torch.float8_e4m3fn,
        "dynamic": "local",
    },
}


def inputs(rows: int = 24, width: int = 256) -> torch.Tensor:
    """Activations [2, rows, width] with channels that are much larger than others, as real ones have."""
    generator = torch.Generator().manual_seed(0)
    outliers = torch.rand(width, generator=generator).clamp(min=0.02).reciprocal()
    return torch.randn(2, rows, width, generator=generator) * outliers


def theirs(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Activations as compressed-tensors quantizes them."""
    args = QuantizationArgs(**THEIRS[dtype])
    whole = generate_gparam(values.min(), values.max()).reshape(1) if dtype == "nvfp4" else None
    flat = values.reshape(1, -1, values.shape[-1]) if args.strategy == "token" else values
    scale, zero = compute_dynamic_scales_and_zp(flat, args, nn.Module(), whole)
    if args.strategy == "token":
        scale = (flat.abs().amax(dim=-1, keepdim=True) / 448).clamp(
            min=1e-12
        )  # theirs has one for all tokens but the first axes
        zero = torch.zeros_like(scale)
    return fake_quantize(flat, scale, zero, args, whole).reshape(values.shape)


@pytest.mark.parametrize("dtype", [name for name in THEIRS if name != "float8_e4m3fn@tensor"])
def test_activations_are_rounded_like_compressed_tensors(dtype: str) -> None:
    values = inputs()
    assert torch.equal(quantize_activations(values, dtype), theirs(values, dtype))


def test_int8_rounding_of_activations_is_within_half_a_step_as_in_vllm() -> None:
    """`dynamic_scaled_int8_quant`: scale = amax / 127 of a token in float32, to the nearest integer, half to even."""
    values = inputs()
    found = quantize_activations(values, "int8")
    for token, rounded in zip(values.flatten(0, 1), found.flatten(0, 1), strict=True):
        scale = float(token.abs().max()) / 127
        codes = rounded.double() / scale
        assert torch.allclose(codes, codes.round(), atol=1e-4)
        assert float((token.double() - rounded.double()).abs().max()) <= 0.5001 * scale


def test_activations_with_short_blocks_zeros_or_nonfinite_values_are_rounded() -> None:
    values = inputs(3, 40)
    values[0, 0] = 0.0
    values[1, 1, 7] = math.nan
    values[1, 2, 3] = -math.inf
    for dtype in (*THEIRS, "int8", "mxfp6_e2m3"):
        found = quantize_activations(values, dtype)
        assert torch.equal(found[0, 0], torch.zeros(40))
        assert math.isnan(float(found[1, 1, 7]))
        assert float(found[1, 2, 3]) == -math.inf
        assert int((~torch.isfinite(found)).sum()) == 2
        assert found.dtype == values.dtype
        assert quantize_activations(values.bfloat16(), dtype).dtype == torch.bfloat16


def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    ids = torch.randint(0, 96, (1, 14), generator=torch.Generator().manual_seed(1))
    return transformers.LlamaForCausalLM(config).eval(), {"input_ids": ids}


def candidate(session: de.Session) -> torch.Tensor:
    assert session.inputs is not None
    with ForwardRunner(session.model, session.settings, never) as runner:
        batch = session.inputs.batches[0]
        return main_output(runner.candidate(runner.candidate_call(batch)).output)[1]


@pytest.mark.parametrize("dtype", THEIRS)
def test_logits_with_quantized_activations_equal_those_of_compressed_tensors(dtype: str) -> None:
    """Its own module forward, with its quantizer before every linear layer, on the weights that we dequantize."""
    module, given = llama()
    other = copy.deepcopy(module)
    session = de.open(module, inputs=given)
    session.cast("*_proj", dtype)
    alone = candidate(session)
    session.settings = QUANTISED
    found = candidate(session)

    scheme = QuantizationScheme(targets=["Linear"], input_activations=QuantizationArgs(**THEIRS[dtype]))
    apply_quantization_config(other, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    for name, layer in other.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            weight = session.model.weights[f"{name}.weight"]
            layer.weight.data = weight_values(weight, dtype)
            if dtype == "nvfp4":
                layer.register_forward_pre_hook(_set_global_scale)
    with torch.no_grad():
        expected = other(**given).logits
    assert not torch.allclose(alone, expected, atol=1e-4), "the activations make a difference"
    assert torch.allclose(found, expected, atol=2e-5)


def weight_values(weight: Weight, dtype: str) -> torch.Tensor:
    """Return the values of a weight as it is cast. The scale of fused siblings is shared."""
    if weight.scale is None:
        return weight.tensor.float()
    return dequantize(weight.tensor, weight.scale, torch.float32, dtypes.BY_NAME[dtype].blocks)


def _set_global_scale(layer: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    layer.input_global_scale.data = generate_gparam(args[0].min(), args[0].max()).reshape(1)


@pytest.mark.parametrize("dtype", ["int4@g128", "int4@g128a", "int8@g128", "bfloat16"])
def test_activations_of_weight_only_formats_are_not_quantized(dtype: str) -> None:
    module, given = llama()
    session = de.open(module, inputs=given)
    session.cast("*_proj", dtype)
    plain = candidate(session)
    session.settings = QUANTISED
    assert torch.equal(candidate(session), plain)
    assert not session.drift().weights_only


def test_drift_report_says_whether_activations_were_quantized() -> None:
    module, given = llama()
    session = de.open(module, inputs=given)
    session.cast("*_proj", "nvfp4")
    alone = session.drift()
    session.settings = QUANTISED
    both = session.drift()
    assert alone.weights_only
    assert not both.weights_only
    assert both.settings == "activations quantized as their weights"
    assert both.output.kl_mean > alone.output.kl_mean  # type: ignore[operator]


def test_flow_lists_quantized_activations() -> None:
    module, given = llama()
    session = de.open(module, inputs=given)
    session.cast("*.mlp", "nvfp4")
    session.cast("*.down_proj", "int4@g128")
    session.settings = QUANTISED
    rows = [(row.module, row.target, row.elements, row.in_torch) for row in session.flow()]
    layers = (f"model.layers.{number}.mlp.{name}_proj" for number in range(2) for name in ("gate", "up"))
    assert sorted(rows) == [(name, "nvfp4", 14 * 128, "rounded") for name in layers]


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_activations_of_packed_experts_are_quantized_in_every_implementation(implementation: str) -> None:
    """With scales per token, all implementations agree. They round activations because the parts of a weight are tracked."""
    module, given = architectures.make("qwen3_moe")
    module.set_experts_implementation(implementation)  # type: ignore[operator]
    session = de.open(module, inputs=given)
    session.cast("*.experts", "int8")
    plain = candidate(session)
    session.settings = QUANTISED
    found = candidate(session)
    assert not torch.equal(found, plain)
    rounded = [row for row in session.flow() if row.in_torch == "rounded"]
    assert {row.module for row in rounded} == {f"model.layers.{layer}.mlp.experts" for layer in range(2)}
    module.set_experts_implementation("eager")  # type: ignore[operator]
    assert torch.allclose(candidate(session), found, atol=1e-5)


class Ways(nn.Module):
    """One weight in all the ways of a product: each gives the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 32, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight
        return torch.stack(
            [
                nn.functional.linear(x, w),
                nn.functional.linear(input=x, weight=w),
                x @ w.T,
                torch.matmul(x, w.transpose(0, 1)),
                (w @ x.T).T,
                torch.mm(x, w.t()),
                torch.addmm(torch.zeros(8), x, w.t()),
                torch.bmm(x[None], w.t()[None])[0],
                torch.einsum("tk,ok->to", x, w),
                torch.einsum("ok,tk->to", w, x),
                torch.stack([torch.mv(w, token) for token in x]),
                torch.cat([nn.functional.linear(x, part) for part in w.chunk(2)], dim=1),
                x @ w.float().contiguous().mT,
            ]
        )


@pytest.mark.parametrize("dtype", ["int8", "mxfp4"])
def test_activations_of_every_kind_of_matrix_product_are_quantized(dtype: str) -> None:
    x = inputs(3, 32)[0]
    session = de.open(Ways(), inputs=(x,))
    session.cast("*", dtype)
    session.settings = QUANTISED
    rounded = quantize_activations(x, dtype)
    expected = rounded.double() @ weight_values(session.model.weights["weight"], dtype).double().T
    for found in candidate(session):
        assert torch.allclose(found.double(), expected, atol=1e-4, rtol=1e-5)


def test_report_notes_which_operations_have_inputs_that_are_not_quantized() -> None:
    module, given = architectures.make("torch_convolutional")
    session = de.open(module, inputs=given)
    session.cast("*", "int8")
    session.settings = QUANTISED
    assert any("inputs of conv2d are not quantized" in notice for notice in session.drift().notices)
    session.settings = RunSettings()
    assert not any("not quantized" in notice for notice in session.drift().notices)


def test_activations_are_quantized_under_autocast() -> None:
    module, given = llama()
    session = de.open(module, inputs=given)
    session.cast("*_proj", "float8_e4m3fn")
    session.settings = RunSettings(autocast="bfloat16", quantize_activations="weights")
    report = session.drift()
    assert report.output.nonfinite == 0
    assert any(row.target == "float8_e4m3fn" and row.source == "float32" for row in session.flow())


def test_scan_and_causes_include_quantized_activations() -> None:
    """The model has one layer, so that a score is the drift, with and without quantized activations."""
    layer = nn.Linear(64, 8, bias=False)
    torch.manual_seed(0)
    nn.init.normal_(layer.weight)
    x = inputs(40, 64)[0]
    found = {}
    for settings in (RunSettings(), QUANTISED):
        session = de.open(nn.Sequential(copy.deepcopy(layer)), inputs=(x,))
        session.settings = settings
        exact = session.scan(["nvfp4"], exact=True)
        estimate = session.scan(["nvfp4"], draws=400)
        assert exact.activations == estimate.activations == settings.quantize_activations
        assert estimate.scores()["0.weight", "nvfp4"] == pytest.approx(exact.scores()["0.weight", "nvfp4"], rel=0.25)
        session.cast("*", "nvfp4")
        whole = session.drift().output.rel_l2 ** 2
        assert exact.scores()["0.weight", "nvfp4"] == pytest.approx(whole)
        assert session.causes().whole == pytest.approx(whole, rel=1e-5)
        found[settings] = whole
    assert found[QUANTISED] > 1.3 * found[RunSettings()]
