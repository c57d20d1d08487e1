"""A weight whose tensors could be read in several ways is read in the way that its configuration means, or not at all. What is not
read is named as part of a quantized weight, and never taken for plain values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.quantized.block_scaled import CASES, ct
from tests.helpers.quantized.case import Case
from tests.helpers.quantized.quantizers import awq, gptq, mlx_affine, torchao_blocks

from dtype_engine.checkpoint import Checkpoint, open_checkpoint
from dtype_engine.checkpoint.check import check
from dtype_engine.runtime.weights.coded import CodedSource


def assert_unread(checkpoint: Checkpoint) -> None:
    """Assert that no weight is decoded and that every tensor has a reason why it can't be cast."""
    assert not checkpoint.coded
    assert all(tensor.uncastable_reason for tensor in checkpoint.tree().tensors.values())


def values_of(case: Case, folder: Path) -> np.ndarray[Any, Any]:
    """Return the decoded values of the only weight of a case."""
    (weight,) = open_checkpoint(case.save(folder)).coded.values()
    return CodedSource(weight).read().numpy()


def _other_group(case: Case, targets: list[str], **settings: Any) -> dict[str, Any]:
    """Return the config group of a case with other settings and other target modules."""
    (own,) = case.config["quantization_config"]["config_groups"].values()
    return {**own, "targets": targets, "weights": {**own["weights"], **settings}}


@pytest.mark.parametrize("targets", [["re:y"], ["Embedding"], ["model.layers.0.y"]])
@pytest.mark.parametrize("name", ["ct int4 with zero points", "ct int4 in groups"])
def test_zero_points_select_the_config_group_of_a_module(name: str, targets: list[str], tmp_path: Path) -> None:
    case = CASES[name]()
    symmetric = _other_group(case, ["Linear"])["weights"]["symmetric"]
    case.config = ct(_other_group(case, targets, symmetric=not symmetric), _other_group(case, ["Linear"]))
    np.testing.assert_array_equal(values_of(case, tmp_path), case.right["x.weight"])


@pytest.mark.parametrize(("location", "read"), [("weight_input", True), ("weight_output", True), ("input", False)])
def test_weights_with_input_transforms_are_not_decoded(location: str, read: bool, tmp_path: Path) -> None:
    case = CASES["ct int4 in groups"]()
    apply = [{"targets": ["Linear"], "location": location, "inverse": False}]
    transforms = {"config_groups": {"R4": {"type": "hadamard", "apply": apply}}}
    case.config["quantization_config"]["transform_config"] = transforms
    checkpoint = open_checkpoint(case.save(tmp_path))
    if read:
        assert checkpoint.coded
    else:
        assert_unread(checkpoint)


def test_stacked_experts_with_a_column_order_are_not_decoded(tmp_path: Path) -> None:
    case = CASES["ct int4 stacked"]()
    case.tensors["x.weight_g_idx"] = torch.arange(64, dtype=torch.int32) // 32
    assert_unread(open_checkpoint(case.save(tmp_path)))


@pytest.mark.parametrize(
    ("name", "part", "shape"),
    [
        ("ct fp8 by rows", "x.weight_scale", (1, 48)),
        ("fp8 by rows", "x.weight_scale", (1, 48)),
        ("modelopt fp8 by rows", "x.weight_scale", (1, 48)),
        ("gpt-oss", "model.layers.0.mlp.experts.gate_up_proj_scales", (1, 3, 16, 2)),
        ("ct int4 stacked", "x.weight_scale", (1, 3, 8, 2)),
    ],
)
def test_weight_with_scales_along_the_wrong_dimension_is_not_decoded(
    name: str, part: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    case = CASES[name]()
    if shape == (1, 48):  # as many columns as rows, so that the number of scales tells nothing
        case.tensors["x.weight"] = torch.zeros(48, 48).to(torch.float8_e4m3fn)
        case.tensors[part] = torch.ones(48)
        assert open_checkpoint(case.save(tmp_path)).coded
    case.tensors[part] = case.tensors[part].reshape(shape)
    assert_unread(open_checkpoint(case.save(tmp_path)))


def test_quark_weight_with_column_scales_is_not_decoded(tmp_path: Path) -> None:
    case = CASES["quark fp8"]()
    case.config["quantization_config"]["layer_quant_config"]["*"]["weight"]["ch_axis"] = 1
    assert_unread(open_checkpoint(case.save(tmp_path)))


def test_torchao_pre_scale_of_activations_multiplies_the_columns_of_the_weight(tmp_path: Path) -> None:
    made = torchao_blocks()
    factors = torch.rand(64) + 0.5
    made.tensors["m._weight_act_pre_scale"] = factors
    made.right["m.weight"] = made.right["m.weight"] * factors.numpy()
    made.check(tmp_path, "torchao:int4@g32")


def test_torchao_weight_with_a_scalar_input_factor_is_not_decoded(tmp_path: Path) -> None:
    made = torchao_blocks()
    made.tensors["m._weight_act_pre_scale"] = torch.tensor(2.0)
    assert not made.open(tmp_path).coded


@pytest.mark.parametrize(
    "settings", [{"bits": [4]}, {"group_size": [32]}, {"bits": {"a": 4}}, {"dynamic": {"m": {"bits": [4]}}}]
)
@pytest.mark.parametrize("made", [gptq, awq])
def test_gptq_and_awq_weights_with_non_numeric_bits_are_not_decoded(
    made: Callable[[], Case], settings: dict[str, Any], tmp_path: Path
) -> None:
    changed = made()
    changed.config["quantization_config"] |= settings
    assert bool(changed.open(tmp_path).coded) is ("dynamic" in settings)


def test_check_ignores_unused_bits_of_packed_awq_words(tmp_path: Path) -> None:
    assert not check(awq("gemv").open(tmp_path), "model").findings


@pytest.mark.slow
def test_stack_of_more_than_4096_mlx_experts_is_kept_as_one_weight(tmp_path: Path) -> None:
    made = mlx_affine(name="l.switch_mlp.up_proj", shape=(4097, 1, 32))
    assert made.open(tmp_path).coded.keys() == {"l.switch_mlp.up_proj.weight"}


def test_control_characters_in_quant_method_are_escaped(tmp_path: Path) -> None:
    case = CASES["ct int4 in groups"]()
    case.config = {"quantization_config": {"quant_method": "\x1b[2J"}}
    for tensor in open_checkpoint(case.save(tmp_path)).tree().tensors.values():
        assert tensor.uncastable_reason
        assert tensor.uncastable_reason.isprintable()


def test_check_parses_the_descriptions_of_undecoded_comfyui_layers_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["comfy fp8 in metadata"]()
    case.tensors |= {f"{place}.{name}": tensor.clone() for place in range(50) for name, tensor in case.tensors.items()}
    layers = {f"{place}.x": {"format": "another"} for place in range(50)}
    case.metadata["_quantization_metadata"] = json.dumps({"layers": {**layers, "x": {"format": "float8_e4m3fn"}}})
    checkpoint = open_checkpoint(case.save(tmp_path))
    assert checkpoint.coded.keys() == {"x.weight"}
    parsed = []
    monkeypatch.setattr("dtype_engine.checkpoint.schemes.comfy.json.loads", lambda text: parsed.append(text) or {})
    assert not [finding for finding in check(checkpoint, "model").findings if finding.kind != "part-shape"]
    assert len(parsed) <= 1


def test_unquantized_vision_tower_beside_fp8_layers_is_read_as_plain_weights(tmp_path: Path) -> None:
    case = CASES["fp8 with one scale"]()
    prefix = "model.language_model.layers.0.mlp.up_proj"
    case.tensors = {f"{prefix}.{name.removeprefix('x.')}": tensor for name, tensor in case.tensors.items()}
    plain = {"model.visual.blocks.0.attn.qkv.weight": torch.ones(6, 2), "model.visual.logit_scale": torch.ones(())}
    case.tensors |= plain
    checkpoint = open_checkpoint(case.save(tmp_path))
    assert checkpoint.coded.keys() == {f"{prefix}.weight"}
    reasons = {tensor.name: tensor.uncastable_reason for tensor in checkpoint.tree().tensors.values()}
    assert reasons == dict.fromkeys((*plain, f"{prefix}.weight"))
    np.testing.assert_array_equal(
        CodedSource(checkpoint.coded[f"{prefix}.weight"]).read().numpy(), case.right["x.weight"]
    )


@pytest.mark.parametrize(
    ("made", "name"),
    [(gptq, "m.qzeros"), (gptq, "m.scales"), (gptq, "m.qweight"), (lambda: CASES["modelopt nvfp4"](), "x.weight")],
)
def test_weight_with_a_scalar_as_one_of_its_tensors_is_not_decoded(
    made: Callable[[], Case], name: str, tmp_path: Path
) -> None:
    changed = made()
    changed.tensors[name] = changed.tensors[name].reshape(-1)[0].clone()
    checkpoint = changed.open(tmp_path)
    assert_unread(checkpoint)
    check(checkpoint, "model")


def _fp8(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn)


UNREAD: dict[str, dict[str, torch.Tensor]] = {
    "stacked experts of ModelOpt": {"m.gate_up_proj": _fp8(2, 8, 8), "m.gate_up_proj_weight_scale": torch.ones(2)},
    "experts of Llama 4, with scales of columns": {
        "m.gate_up_proj": _fp8(2, 8, 8),
        "m.gate_up_proj_scale": torch.ones(2, 1, 8),
    },
    "TensorRT-LLM": {"m.weight": _fp8(8, 8), "m.weights_scaling_factor": torch.ones(1)},
    "Mistral": {"m.weight": _fp8(8, 8), "m.qscale_weight": torch.ones(1), "m.qscale_act": torch.ones(1)},
    "one scale for each of three fused layers": {"m.weight": _fp8(24, 8), "m.weight_scale": torch.ones(3)},
    "a convolution": {"m.weight": _fp8(8, 8, 3, 3), "m.weight_scale": torch.ones(())},
    "Marlin": {"m.B": torch.ones(8, 8, dtype=torch.int32), "m.s": torch.ones(1, 8)},
    "QuIP#": {"m.Qidxs": torch.ones(8, 8, dtype=torch.int16), "m.SU": torch.ones(8), "m.SV": torch.ones(8)},
    "bitsandbytes in bfloat16 without a description": {
        "m.weight": torch.ones(64, 1).bfloat16(),
        "m.weight.absmax": torch.ones(4),
    },
    "VPTQ": {
        "m.indices": torch.ones(1, 8, 8, dtype=torch.int32),
        "m.centroids.weight": torch.ones(1, 64),
        "m.res_centroids.weight": torch.ones(1, 64),
        "m.weight_scale": torch.ones(8),
        "m.weight_bias": torch.ones(8),
    },
    "Nunchaku": {
        "m.qweight": torch.ones(8, 4, dtype=torch.int8),
        "m.wscales": torch.ones(1, 8),
        "m.smooth_factor": torch.ones(8),
        "m.proj_down": torch.ones(8, 2),
        "m.proj_up": torch.ones(8, 2),
    },
    "ModelOpt with a low-rank part": {
        "m.weight": torch.ones(8, 8, dtype=torch.uint8),
        "m.weight_scale": _fp8(8, 1),
        "m.svdquant_lora_a": torch.ones(2, 16),
        "m.svdquant_lora_b": torch.ones(8, 2),
    },
    "scales of the key-value cache": {
        "a.k_proj.weight": _fp8(8, 8),
        "a.k_proj.strange_scale": torch.ones(1),
        "a.k_scale": torch.ones(()),
        "a.v_scale": torch.ones(()),
    },
    "sparse": {"m.compressed": torch.ones(8, 4), "m.bitmask": torch.ones(8, 1, dtype=torch.uint8)},
}
"""Tensors of weights that are not decoded, most of them floats."""


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8", "modelopt", "compressed-tensors", None])
@pytest.mark.parametrize("name", UNREAD)
def test_float_tensors_of_undecoded_weights_are_not_castable(name: str, method: str | None, tmp_path: Path) -> None:
    declared = {"quant_method": method, "quant_algo": "FP8", "config_groups": {}}
    checkpoint = open_checkpoint(
        Case(UNREAD[name], {}, "", {"quantization_config": declared} if method else {}).save(tmp_path)
    )
    assert not checkpoint.coded
    floats = [tensor for tensor in checkpoint.tree().tensors.values() if tensor.dtype.startswith(("float", "bfloat"))]
    assert floats
    assert all(tensor.uncastable_reason for tensor in floats)
    report = check(checkpoint, "model")
    assert report.findings or "can't be decoded here" in " ".join(report.unchecked)


def test_float8_weight_without_scales_can_be_cast(tmp_path: Path) -> None:
    tensors = {"m.weight": _fp8(8, 8), "m.bias": torch.ones(8), "m.input_scale": torch.ones(1)}
    tree = open_checkpoint(Case(tensors, {}, "", {}).save(tmp_path)).tree()
    assert tree.tensors["m.weight"].uncastable_reason is None
