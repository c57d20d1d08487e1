"""Decides for which layers an export requests quantized activations, and computes the scales of their inputs for NVFP4."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.file_layouts import TORCHAO
from dtype_engine.core.options import RunSettings
from dtype_engine.core.text import printable
from dtype_engine.recipe.schemes import DESCRIBED, keeps_input_scale
from dtype_engine.runtime.export.contents import Contents, ExportTensor, InputScale
from dtype_engine.runtime.export.experts import all_experts, expert_layer
from dtype_engine.runtime.formats.nvfp4 import tensor_scale
from dtype_engine.runtime.weights.coded import stored_scale

_NUMBER = re.compile(r"\d+")


def with_quantised_inputs(
    items: list[ExportTensor], settings: RunSettings, ranges: Mapping[str, float], source: Checkpoint
) -> list[ExportTensor]:
    """Return the weights to export. Each weight whose layer has quantized inputs is marked (`quantised_inputs`), and gets the scale
    of these inputs if its format stores one, as NVFP4 does.

    A layer's inputs are quantized if `settings` request it, or if the layer's weight is exported as stored and the source declares
    quantized inputs for the layer; the source's scale is then kept. ranges: the largest |value| of the inputs of each weight's
    layer, by the weight's name.

    Weights that runtimes fuse have the same inputs, so they use the largest range among them. A layer that was never called (an
    expert to which no token was routed) uses the largest range of the layers whose names differ only in numbers. If loading packs
    several weights into one, the ranges of their inputs are unknown. Such weights are not marked if their format stores an input
    scale.
    """
    before = _declared(source.config)
    alike: dict[str, float] = {}
    for name, largest in ranges.items():
        kind = _NUMBER.sub("", name)
        alike[kind] = max(largest, alike.get(kind, 0.0))
    found = []
    for item in items:
        kept = source.coded.get(item.name) if item.dtype == item.stored else None
        kept = kept if kept is not None and kept.own else None
        module = item.name.removesuffix(".weight")
        said = kept is not None and (module in before or all_experts(expert_layer(module)) in before)
        quantised = item.portable and dtypes.quantizes_activations(item.dtype)
        if quantised and (said or settings.quantize_activations == "weights"):
            if not keeps_input_scale(item.dtype):
                item = dataclasses.replace(item, quantised_inputs=True)
            elif kept is not None and kept.input_scale is not None:
                scale = InputScale(stored_scale(kept.input_scale))
                item = dataclasses.replace(item, quantised_inputs=True, input_scale=scale)
            elif not item.packed_into:
                item = dataclasses.replace(item, quantised_inputs=True, input_scale=_scale(item, ranges, alike))
        found.append(item)
    return found


def _declared(config: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the names and patterns of modules for which a source's `quantization_config` requests quantized inputs."""
    said = (config or {}).get("quantization_config")
    groups = said.get("config_groups") if isinstance(said, dict) else None
    named = [
        group["targets"]
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and group.get("input_activations") and isinstance(group.get("targets"), list)
    ]
    return frozenset(target for targets in named for target in targets if isinstance(target, str))


def _scale(item: ExportTensor, ranges: Mapping[str, float], alike: Mapping[str, float]) -> InputScale:
    among = item.shared.names if item.shared is not None else (item.name,)
    seen = [ranges[name] for name in among if name in ranges]
    largest = max(seen) if seen else alike.get(_NUMBER.sub("", item.name))
    if largest is None:
        return InputScale()
    return InputScale(float(tensor_scale(torch.tensor(largest))), bool(seen))


def needs_calibration(contents: Contents) -> list[ExportTensor]:
    """Return the weights whose layers' inputs need a scale that is still unknown. The model has to run before an export."""
    return [item for item in contents.items if item.input_scale is not None and item.input_scale.value is None]


def refuse_uncalibrated(contents: Contents) -> None:
    if unknown := needs_calibration(contents):
        raise UserError(
            f"{printable(unknown[0].name)} is in {unknown[0].dtype} with quantized activations, whose scale in the file comes from "
            "calibration inputs, and no input has reached it: open the model with inputs and export it from there, or export it "
            "without quantized activations"
        )


def activation_notices(items: Sequence[ExportTensor], settings: RunSettings) -> tuple[str, ...]:
    """Return notices about activations that loaders of the export will quantize differently from the measurement, or not at all."""
    written = [item for item in items if item.portable]
    if settings.quantize_activations == "none":
        return ()
    notices = []
    if plain := sorted({item.dtype for item in written if item.file_layout is TORCHAO}):
        notices.append(
            f"activations of weights in {', '.join(plain)} will not be quantized by diffusers, although they were measured so: the "
            "export has torchao's layout for weights alone"
        )
    if wide := sorted({item.dtype for item in written if not dtypes.quantizes_activations(item.dtype)}):
        notices.append(
            f"activations of weights in {', '.join(wide)} are not quantized, which is how they were measured"
        )
    if by_rule := sorted({item.dtype for item in written if _has_other_rule(item.dtype)}):
        notices.append(
            f"activations of weights in {', '.join(by_rule)} were measured with that rule for scales, and other programs quantize "
            "them with their own"
        )
    if undeclared := [item for item in written if keeps_input_scale(item.dtype) and not item.quantised_inputs]:
        notices.append(
            f"activations of {len(undeclared)} weights in nvfp4, first {printable(undeclared[0].name)}, are not quantized, "
            "although they were measured so: the model packs these weights into one, so the range of each one's inputs is not known"
        )
    if calibrated := [item for item in written if item.input_scale is not None]:
        layers = "1 layer has" if len(calibrated) == 1 else f"{len(calibrated)} layers have"
        notices.append(
            f"{layers} one scale in nvfp4 for all inputs, from the largest calibration input; a measurement computes it from the "
            "largest input of each call"
        )
    if unseen := [item for item in written if item.input_scale is not None and not item.input_scale.seen]:
        notices.append(
            f"no calibration input reached {len(unseen)} of them, first {printable(unseen[0].name)}: their scale is that of the "
            "largest input of the layers with this name"
        )
    return tuple(notices)


def _has_other_rule(dtype: str) -> bool:
    blocks = dtypes.BY_NAME[dtype].blocks
    return dtype in DESCRIBED and blocks is not None and blocks.rule not in ("amax", "compressed-tensors")
