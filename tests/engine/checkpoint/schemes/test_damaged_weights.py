"""A weight whose tensors are incomplete or do not fit together is not returned, and the check of the checkpoint names it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.helpers.quantized import block_scaled, comfy
from tests.helpers.quantized.block_scaled import ct
from tests.helpers.quantized.case import Case

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.check import check

CASES = block_scaled.CASES | comfy.CASES
OPTIONAL = (
    "input_scale", "pre_quant_scale", "scale_input", "comfy_quant", "scaled_fp8", "weight_codebook", "quant_bias", "input_offset",
)  # fmt: skip
"""Tensors without which a weight is complete."""
LEFT_OUT = ("modelopt mixed", "modelslim int8, static and dynamic", "modelslim fp8")
"""Cases of several weights, or of one that can be read without some of its tensors."""


def _with_twin(case: Case) -> dict[str, torch.Tensor]:
    """Return the tensors of a case, each also under a second name, so that the checkpoint has an intact weight of the same kind."""
    twins = {f"twin.{name}": tensor.clone() for name, tensor in case.tensors.items() if name != "scaled_fp8"}
    return {**case.tensors, **twins}


def _damages(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield (description, damaged tensors) for each required tensor, once without it and once with a wrong first dimension."""
    for name, tensor in tensors.items():
        if name.endswith(OPTIONAL) or name.startswith("twin."):
            continue
        yield f"no {name}", {other: each for other, each in tensors.items() if other != name}
        if name.endswith(("scale", "scales", "zero_point", "g_idx", "shape", "weight_zeros", "s_rel")) and tensor.dim():
            longer = torch.zeros(tensor.shape[0] + 300, *tensor.shape[1:], dtype=torch.uint8)
            wrong = longer.view(tensor.dtype) if tensor.element_size() == 1 else longer.to(tensor.dtype)
            yield f"a longer {name}", {**tensors, name: wrong}


@pytest.mark.parametrize("name", [name for name in CASES if name not in LEFT_OUT])
def test_damaged_weight_is_not_decoded_and_is_named_by_check(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    case.tensors = _with_twin(case)
    sound = open_checkpoint(case.save(tmp_path))
    assert sound.coded.keys() > case.right.keys()
    assert not check(sound, "model").findings
    for what, tensors in _damages(dict(case.tensors)):
        case.tensors = tensors
        checkpoint = open_checkpoint(case.save(tmp_path))
        lost = sound.coded.keys() - checkpoint.coded.keys()
        assert len(lost) == 1, what
        of_module = {weight.rpartition(".")[0] for weight in lost}
        findings = check(checkpoint, "model").findings
        assert {finding.tensor.rpartition(".")[0] for finding in findings} == of_module, what


@pytest.mark.parametrize("index", [[0, 1, 2, 4], [0, 1, 2, -1], [0, 1, 2]])
def test_weight_with_an_impossible_column_order_is_not_decoded(index: list[int], tmp_path: Path) -> None:
    case = CASES["ct int4 with ordered columns"]()
    case.tensors["x.weight_g_idx"] = torch.tensor(index, dtype=torch.int32).repeat_interleave(32)
    checkpoint = open_checkpoint(case.save(tmp_path))
    assert not checkpoint.coded


def test_g_idx_of_minus_one_means_no_column_order(tmp_path: Path) -> None:
    case = CASES["ct int4 in groups"]()
    case.tensors["x.weight_g_idx"] = torch.full((160,), -1, dtype=torch.int32)
    (weight,) = open_checkpoint(case.save(tmp_path)).coded.values()
    assert "columns" not in weight.parts
    assert "x.weight_g_idx" in [tensor.name for tensor in weight.beside]


@pytest.mark.parametrize("targets", [["Linear"], ["x"], ["re:.*x"], ["re:("], []])
def test_config_group_applies_to_the_modules_that_it_targets(targets: list[str], tmp_path: Path) -> None:
    case = CASES["ct fp8 by rows"]()
    other = {
        "targets": ["re:y"],
        "format": "pack-quantized",
        "weights": {"num_bits": 4, "type": "int", "strategy": "channel"},
    }
    own = {
        "targets": targets, "format": "float-quantized", "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    }  # fmt: skip
    case.config = ct(other, own)
    assert open_checkpoint(case.save(tmp_path)).coded


@pytest.mark.parametrize(
    "declared",
    [
        {"config_groups": 5},
        {"config_groups": {"a": 5}},
        {"config_groups": {"a": {"targets": 5, "weights": {"strategy": "group", "group_size": "128"}}}},
        {"config_groups": {"a": {"weights": {"strategy": "block", "block_structure": [0, "x"], "type": "float"}}}},
        {"config_groups": {"a": {"weights": {"strategy": [], "num_bits": {}, "type": []}}}},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "weight_block_size": "128"},
        {"quant_method": "modelopt", "quant_algo": 5},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"x": 5}},
        {"quant_method": "modelopt", "quant_algo": "W4A8_UNKNOWN", "group_size": -1},
        {"quant_method": "quark", "global_quant_config": 5, "layer_quant_config": {"*": 5}},
        {"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp4"}]}},
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": {}, "qscheme": []}}},
        5,
        {},
    ],
)
def test_weights_with_an_unusable_quantization_config_are_not_decoded(declared: object, tmp_path: Path) -> None:
    for name in ("ct int4 in groups", "ct nvfp4", "modelopt int4"):
        (folder := tmp_path / name).mkdir()
        case = CASES[name]()
        case.config, case.hf_quant_config = {"quantization_config": declared}, None
        assert not open_checkpoint(case.save(folder)).coded


@pytest.mark.parametrize(
    "about",
    [
        "[1]",
        "{",
        '{"format": 5}',
        '{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 32}',
        '{"format": "mxfp8", "convrot": true}',
        "5",
        '"mxfp8"',
    ],
)
def test_comfyui_layer_in_an_unknown_format_is_not_decoded(about: str, tmp_path: Path) -> None:
    case = CASES["comfy int8"]()
    case.tensors["x.comfy_quant"] = torch.tensor(list(about.encode()), dtype=torch.uint8)
    assert not open_checkpoint(case.save(tmp_path)).coded


def test_comfyui_file_written_by_modelopt_is_not_decoded(tmp_path: Path) -> None:
    case = CASES["comfy nvfp4"]()
    del case.tensors["x.comfy_quant"]
    case.metadata = {"_quantization_metadata": '{"layers": {"x": {"format": "nvfp4"}}}'}
    assert open_checkpoint(case.save(tmp_path)).coded
    case.metadata["quantization_config"] = '{"quant_algo": "NVFP4"}'
    assert not open_checkpoint(case.save(tmp_path)).coded


@pytest.mark.parametrize("name", CASES)
def test_check_counts_scales_that_are_nan(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    for part, tensor in case.tensors.items():
        if not part.endswith(("weight_scale", "_scale_2", "global_scale", "scale_weight", "_scales", ".scale")):
            continue
        spoilt = tensor.clone()
        first = spoilt.view(-1)[:1]
        if tensor.element_size() == 1:
            first.view(torch.uint8).fill_(0x7F if tensor.dtype == torch.float8_e4m3fn else 0xFF)
        else:
            first.fill_(torch.nan)
        checkpoint = open_checkpoint(replace(case, tensors={**case.tensors, part: spoilt}).save(tmp_path))
        assert [(finding.kind, finding.tensor) for finding in check(checkpoint, "model").findings] == [
            ("scale-values", part)
        ]
