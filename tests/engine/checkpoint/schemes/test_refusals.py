"""Weights with missing tensors, or with tensors that contradict each other or their declaration, are not decoded."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.quantized.block_scaled import auto_round, ct_e5m3, modelopt_svd
from tests.helpers.quantized.case import Case, text
from tests.helpers.quantized.low_rank import sdnq
from tests.helpers.quantized.quantizers import (
    awq,
    bnb_4bit,
    bnb_8bit,
    gemma,
    gptq,
    hqq,
    mlx_affine,
    mlx_float,
    quanto,
    quanto_bits,
    sinq,
    torchao_blocks,
    torchao_int4,
    torchao_swizzled,
)

from dtype_engine.checkpoint.check import check
from dtype_engine.core.errors import UserError

Change = Callable[[Case], Any]


def without(name: str) -> Change:
    """Return a change that removes the tensor."""
    return lambda made: made.tensors.pop(name)


def shorter(name: str) -> Change:
    """Return a change that removes the last row of the tensor."""
    return lambda made: made.tensors.update({name: made.tensors[name][:-1]})


def other(name: str, tensor: torch.Tensor) -> Change:
    """Return a change that replaces the tensor, or adds it if there is none of this name."""
    return lambda made: made.tensors.update({name: tensor})


def declared(key: str = "quantization_config", **settings: Any) -> Change:
    """Return a change of the entry in config.json."""
    return lambda made: made.config[key].update(settings)


def described(name: str, **settings: Any) -> Change:
    """Return a change of the JSON in the tensor that describes the weight."""

    def change(made: Case) -> None:
        found = json.loads(bytes(made.tensors[name].tolist()))
        made.tensors[name] = text(json.dumps(found | settings))

    return change


def in_meta(**settings: Any) -> Change:
    """Return a change of what SINQ's file says about the layer."""

    def change(made: Case) -> None:
        (layers,) = made.beside.values()
        layers["m"]["meta"].update(settings)

    return change


def attributes(**settings: Any) -> Change:
    """Return a change of the description in the metadata of the header."""

    def change(made: Case) -> None:
        found = json.loads(made.metadata["m.weight"])
        made.metadata["m.weight"] = json.dumps(found | {"_data": found["_data"] | settings})

    return change


def undeclared(made: Case) -> None:
    """Remove what config.json and the metadata declare."""
    made.config.clear()
    made.metadata.clear()


STATE = "m.weight.quant_state.bitsandbytes__nf4"
LARGE = torch.zeros((1 << 20) + 1, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("made", "change"),
    [
        *((gptq, change) for change in (
            without("m.scales"), without("m.qzeros"), shorter("m.scales"), shorter("m.qzeros"),
            declared(group_size=64), declared(group_size="32"), declared(bits=8), declared(checkpoint_format="marlin"),
            declared(quant_method="other"), undeclared,
            other("m.g_idx", torch.zeros(95, dtype=torch.int32)), other("m.g_idx", torch.zeros(96, dtype=torch.int64)),
            other("m.scales", torch.zeros(3, 64, dtype=torch.int32)),
        )),
        (lambda: gptq(order="regular"), shorter("m.qweight")),
        *((awq, change) for change in (
            without("m.scales"), without("m.qzeros"), shorter("m.scales"), shorter("m.qzeros"), shorter("m.qweight"),
            declared(group_size=64), declared(bits=8), undeclared,
        )),
        *((bnb_4bit, change) for change in (
            without("m.weight.absmax"), without("m.weight.quant_map"), without(STATE), without("m.weight"),
            shorter("m.weight.absmax"), shorter("m.weight.quant_map"), shorter("m.weight"),
            described(STATE, shape=[24, 64]), described(STATE, shape=[24, -128]), described(STATE, shape="24"),
            described(STATE, blocksize=128), described(STATE, blocksize=0), described(STATE, blocksize=None),
            other(STATE, text("no JSON")), other(STATE, text("[1]")),
            other("m.weight.absmax", torch.zeros(48, dtype=torch.uint8)),
        )),
        *((lambda: bnb_4bit(nested=True), change) for change in (
            without("m.weight.nested_absmax"), without("m.weight.nested_quant_map"), shorter("m.weight.nested_absmax"),
            shorter("m.weight.nested_quant_map"), described(STATE, nested_offset=None),
            described(STATE, nested_blocksize=0),
        )),
        *((bnb_8bit, change) for change in (
            without("m.SCB"), shorter("m.SCB"), other("m.weight_format", torch.tensor(2, dtype=torch.uint8)),
        )),
        *((hqq, change) for change in (
            without("m.scale"), without("m.zero"), without("m.shape"), without("m.packing"), shorter("m.scale"),
            shorter("m.zero"), shorter("m.W_q"), other("m.packing", text("2bit_u8")), other("m.packing", text("x")),
            other("m.axis", torch.tensor(0, dtype=torch.int32)), other("m.shape", torch.tensor([32, 32])),
            other("m.shape", torch.tensor([0, 48])), other("m.quant_scale", torch.tensor(1, dtype=torch.uint8)),
            other("m.group_size", torch.tensor(32, dtype=torch.int32)),
        )),
        *((sinq, change) for change in (
            without("m.meta.scale.x"), without("m.meta.scale.s"), without("m.meta.zero.m"), without("m.meta.scale2"),
            shorter("m.W_q"), shorter("m.meta.scale.x"), shorter("m.meta.zero.x"), shorter("m.meta.scale2"),
            other("m.meta.zero", torch.tensor(8.0)), other("m.meta.scale.s", torch.ones(1, 4)),
            *(in_meta(**change) for change in (
                {"method": "sinq_nf4"}, {"method": None}, {"axis": 0}, {"packing": "8bit_u8"}, {"packing": None},
                {"shape": [32, 32]}, {"shape": [48, 32]}, {"shape": ["32", 48]}, {"shape": 5}, {"view_as_float": True},
            )),
        )),
        *((lambda: sinq(plain=True), change) for change in (
            without("m.meta.scale"), without("m.meta.zero"), shorter("m.meta.scale"), shorter("m.meta.zero"),
            other("m.meta.scale", torch.ones(96, 1, dtype=torch.uint8)),
        )),
        *((mlx_affine, change) for change in (
            without("m.scales"), without("m.biases"), shorter("m.scales"), shorter("m.biases"), shorter("m.weight"),
            declared("quantization", group_size=64), declared("quantization", bits=8), undeclared,
            declared("quantization", mode="mxfp4"), declared("quantization", mode=["affine"]),
            declared("quantization", bits=4.0), declared("quantization", bits=[4]),
        )),
        *((mlx_float, change) for change in (
            without("m.scales"), shorter("m.scales"), declared("quantization", mode="nvfp4"),
            declared("quantization", mode="affine"), other("m.global_scale", torch.tensor(1.0)),
        )),
        *((torchao_blocks, change) for change in (
            without("m._weight_scale"), without("m._weight_qdata"), shorter("m._weight_scale"),
            shorter("m._weight_zero_point"), undeclared, attributes(block_size=[1, 64]), attributes(block_size=[1, 0]),
            attributes(block_size=None), attributes(target_dtype={"_data": "a b"}),
            lambda made: made.metadata.update({"m.weight": '{"_type"'}),
            lambda made: made.metadata.update({"m.weight": '{"_type": "Int4Tensor", "_data": {}}'}),
        )),
        *((torchao_swizzled, change) for change in (
            without("m._weight_scale"), shorter("m._weight_scale"), attributes(is_swizzled_scales=False),
            attributes(block_size=16),
        )),
        *((torchao_int4, change) for change in (
            without("m._weight_zero_point"), shorter("m._weight_scale"), shorter("m._weight_zero_point"),
            attributes(block_size=[2, 32]), attributes(block_size=[1, 48]),
        )),
        *((quanto_bits, change) for change in (
            *(change(f"model.layers.0.mlp.up_proj.weight.{end}") for change in (without, shorter)
              for end in ("_data._data", "_scale", "_shift")),
            *(other("model.layers.0.mlp.up_proj.bias", torch.zeros(rows)) for rows in (23, 36)),
            lambda made: made.config.update(hidden_size=128),
        )),
        *((partial(awq, "gemv_fast"), change) for change in (
            without("m.qzeros"), shorter("m.scales"), shorter("m.qweight"), declared("quantization_config", group_size=48),
        )),
        *((partial(sdnq, rank=3), change) for change in (
            *(change(f"m.{end}") for change in (without, shorter) for end in ("scale", "zero_point", "svd_up", "svd_down")),
            shorter("m.weight"), other("m.svd_up", torch.zeros(24, 4)), other("m.scale_2", torch.zeros(1)), undeclared,
        )),
        *((partial(gptq, 5, "gptq_p"), change) for change in (
            declared(checkpoint_format="gptq"), declared(checkpoint_format="gptq_v2"), shorter("m.qweight"),
        )),
        *((ct_e5m3, change) for change in (
            without("x.weight_scale"), shorter("x.weight_scale"), other("x.weight_global_scale", torch.ones(1)),
        )),
        *((lambda: auto_round(ct_e5m3()), change) for change in (
            shorter("x.weight_scale"), declared(quant_method="gptq"), declared(rotation_config={"hadamard_type": "x"}),
            other("x.weight_zp", torch.zeros(6, 5)),
        )),
        *((modelopt_svd, change) for change in (
            *(change(f"x.svdquant_lora_{end}") for change in (without, shorter) for end in "ab"),
            declared(quant_algo="FP8"),
        )),
        *((gemma, change) for change in (
            without("m.weight_scale"), shorter("m.weight_scale"), other("m.weight_scale", torch.zeros(24, 3)),
        )),
        *((quanto, change) for change in (
            without("m.weight._scale"), shorter("m.weight._scale"),
            other("m.weight._scale", torch.zeros(24, 1, dtype=torch.int32)),
        )),
    ],
)  # fmt: skip
def test_weight_with_tensors_that_contradict_each_other_is_not_decoded(
    tmp_path: Path, made: Callable[[], Case], change: Change
) -> None:
    changed = made()
    change(changed)
    assert changed.open(tmp_path).coded == {}


@pytest.mark.parametrize("settings", [{"group_size": 64}, {"bits": 8}, {"m": {"bits": 4, "group_size": 16}}])
def test_check_finds_a_wrong_group_size(tmp_path: Path, settings: dict[str, Any]) -> None:
    made = mlx_affine()
    assert not check(made.open(tmp_path), "m").findings
    declared("quantization", **settings)(made)
    (finding,) = check(made.open(tmp_path), "m").findings
    assert (finding.kind, finding.tensor) == ("part-shape", "m.scales")


@pytest.mark.parametrize(("made", "name"), [(bnb_4bit, STATE), (hqq, "m.packing")])
def test_weight_with_an_oversized_quantization_state_is_refused(
    tmp_path: Path, made: Callable[[], Case], name: str
) -> None:
    changed = made()
    changed.tensors[name] = LARGE
    with pytest.raises(UserError, match="too many for what it describes"):
        _ = changed.open(tmp_path).coded
