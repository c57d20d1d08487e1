"""Inputs of layers that another program quantized, rounded as its configuration declares: against plain torch with inputs that
numpy rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.matrix import forms

import dtype_engine as de
from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.schemes.registry import input_format

Array = np.ndarray[Any, Any]


def _fp8(values: Array) -> Array:
    """Round rows to float8 with a scale for each: its largest value becomes 448."""
    scale = np.abs(values).max(-1, keepdims=True).astype(np.float32) / np.float32(448)
    return (values / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def _fp8_in_blocks(values: Array) -> Array:
    return np.concatenate([_fp8(values[..., start : start + 128]) for start in range(0, values.shape[-1], 128)], -1)


def _int8(values: Array) -> Array:
    scale = np.abs(values).max(-1, keepdims=True) / np.float32(127)
    return np.round(values / scale) * scale


_TOKEN = {"symmetric": True, "strategy": "token", "dynamic": True}
CASES: dict[str, tuple[dict[str, Any] | None, Callable[[Array], Array]]] = {
    "fp8 in blocks": (None, _fp8_in_blocks),
    "ct fp8 by rows": ({"num_bits": 8, "type": "float", **_TOKEN}, _fp8),
    "ct int8": ({"num_bits": 8, "type": "int", **_TOKEN}, _int8),
}


def _made(scheme: str, folder: Path, arguments: dict[str, Any] | None) -> forms.Made:
    """A model with a quantized up projection, whose inputs are declared to be rounded."""
    make = forms.CASES[scheme]

    def with_inputs() -> forms.Case:
        case = make()
        if arguments is not None:
            case.config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = arguments
        return case

    return forms.quantized(folder, with_inputs)


@pytest.mark.parametrize("scheme", CASES)
def test_inputs_of_quantized_layers_are_rounded_as_the_config_declares(scheme: str, tmp_path: Path) -> None:
    arguments, rounded = CASES[scheme]
    made = _made(scheme, tmp_path, arguments)
    drifts = []
    for activations in ("none", "weights"):
        settings = de.RunSettings(quantize_activations=activations)  # type: ignore[arg-type]
        session = de.open(made.model, options=de.Options(tensors=made.inputs_file, settings=settings))
        assert "--quantize-activations weights" in " ".join(session.model.notices)
        drifts.append(session.drift().output)
    assert drifts[0].max_abs == 0
    module = made.module
    assert module is not None
    with torch.no_grad():
        right = module(**made.inputs).logits.double()
        layer = module.model.layers[0].mlp.up_proj
        layer.register_forward_pre_hook(lambda _, given: (torch.from_numpy(rounded(given[0].numpy())),))
        served = module(**made.inputs).logits.double()
    assert drifts[1].max_abs == pytest.approx(float((right - served).abs().max()), rel=1e-4)
    assert drifts[1].sqnr_db == pytest.approx(20 * float((right.norm() / (right - served).norm()).log10()), abs=1e-3)
    causes = session.causes()
    assert [cause.name for cause in causes.causes][:1] == ["model.layers.0.mlp.up_proj"]


@pytest.mark.parametrize(
    ("scheme", "form"),
    [
        ("fp8 by rows", "float8_e4m3fn"), ("fp8 with one scale", "float8_e4m3fn@tensor"), ("deepseek", ""),
        ("modelopt fp8", "float8_e4m3fn@tensor"),
        ("modelopt fp8 by rows", "float8_e4m3fn"), ("ct int8", ""), ("gptq", ""),
    ],
)  # fmt: skip
def test_format_of_quantized_inputs_is_read_from_the_config(scheme: str, form: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(forms.CASES[scheme]().save(tmp_path))
    assert {input_format(weight, checkpoint.config) for weight in checkpoint.coded.values()} == {form}
