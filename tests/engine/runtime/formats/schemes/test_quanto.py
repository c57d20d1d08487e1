"""optimum-quanto: 8 bits of linear layers and of convolutions, and 4 and 2 bits, whose shape is not in the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers.quantized.quantizers import quanto, quanto_bits


@pytest.mark.parametrize("codes", ["int8", "e4m3"])
@pytest.mark.parametrize("shape", [(24, 40), (24, 3, 2, 2)])
def test_quanto_8_bit_codes_with_channel_scales_are_decoded(tmp_path: Path, codes: str, shape: tuple[int, ...]) -> None:
    quanto(codes, shape).check(tmp_path, f"quanto:{codes}@channel")


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("shape", [(24, 256), (25, 192), (24, 160), (26, 96), (27, 416)])
def test_quanto_2_and_4_bit_codes_are_decoded(tmp_path: Path, bits: int, shape: tuple[int, int]) -> None:
    """The groups have 128, 96, 32, 96 and 32 values. Some matrices have an odd number of groups."""
    case = quanto_bits(bits, shape)
    case.check(tmp_path, case.format)


def test_quanto_integer_zero_points_are_subtracted_from_the_codes(tmp_path: Path) -> None:
    quanto_bits(whole=True).check(tmp_path, "quanto:int4@g96")


@pytest.mark.parametrize(
    ("module", "config"),
    [
        ("q_proj", {"hidden_size": 192}),
        ("down_proj", {"text_config": {"intermediate_size": 192}}),
        ("o_proj", {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 48}),
        ("proj", {}),  # the bias says it
    ],
)
def test_shape_of_packed_quanto_weights_comes_from_config_or_bias(
    tmp_path: Path, module: str, config: dict[str, object]
) -> None:
    case = quanto_bits()
    case.tensors = {name.replace("up_proj", module): each for name, each in case.tensors.items()}
    (right,) = case.right.values()
    name = f"model.layers.0.mlp.{module}"
    case.right, case.config = {f"{name}.weight": right}, dict(config)
    if not config:
        case.tensors[f"{name}.bias"] = torch.zeros(len(right))
    case.check(tmp_path, "quanto:int4@g96")


def test_packed_quanto_weight_of_unknown_shape_is_not_decoded(tmp_path: Path) -> None:
    case = quanto_bits()
    case.config = {}
    assert not case.open(tmp_path).coded
