"""Refuses a checkpoint that was quantised by another program if transformers would load wrong values from it.

transformers ignores quantisation methods that it does not know. It then uses codes as values, leaves out scales, or initialises
weights randomly, all without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.packed_weights import (
    BLOCK_SCALED,
    COMPRESSED,
    DEEPSEEK_V4,
    PackedWeight,
    declared_method,
    packed_weights,
    quantized_parts,
)
from dtype_engine.core import dtypes
from dtype_engine.core.errors import NoForward
from dtype_engine.core.text import printable
from dtype_engine.runtime.model.name_mapping import Placement


def refuse_unread(title: str, checkpoint: Checkpoint, module: nn.Module, placements: Mapping[str, Placement]) -> None:
    """Raise NoForward if transformers would load wrong values for weights that another program quantised.

    title: the name of the model, for the error. module: the model on the meta device. placements: for each tensor of the files, the
    tensor of the module into which it is loaded.
    """
    parts = quantized_parts(checkpoint.foreign, checkpoint.config)
    parts |= {name: why for name, why in _integers_for_floats(checkpoint, module, placements) if name not in parts}
    if not parts:
        return
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    weights = packed_weights(checkpoint.foreign)
    method = declared_method(checkpoint.config)
    known = {key.removesuffix("_4bit").removesuffix("_8bit") for key in AUTO_QUANTIZATION_CONFIG_MAPPING}
    if method not in known:
        name = weights[0].codes if weights else next(iter(parts))
        what = parts[name] if parts[name].startswith(("holds", "belongs")) else f"is {parts[name]}"
        why = (
            "config.json declares no quantisation method"
            if method is None
            else "transformers does not know this method"
        )
        raise NoForward(
            f"{title}: no forward pass: {printable(name)} {what}, and {why}, so its codes would be taken for values; open the "
            "checkpoint that it was made from to measure"
        )
    for weight in weights:
        if (problem := _misread(weight, checkpoint, method)) is not None:
            raise NoForward(f"{title}: no forward pass: {problem}")
    if (odd := _unpaired(parts, weights, checkpoint)) is not None:
        raise NoForward(f"{title}: no forward pass: {odd}; `dtype-engine check` lists all such tensors")


def _integers_for_floats(
    checkpoint: Checkpoint, module: nn.Module, placements: Mapping[str, Placement]
) -> Iterator[tuple[str, str]]:
    """Yield each integer tensor from which transformers would load a floating-point parameter, and a description of the tensor.
    placements: for each tensor of the files, the tensor of the module into which it is loaded.
    """
    floats = {
        name for name, parameter in module.named_parameters(remove_duplicate=False) if parameter.is_floating_point()
    }
    for name, tensor in checkpoint.foreign.items():
        row = dtypes.BY_NAME.get(tensor.dtype)
        if row is not None and row.kind == "int" and name in placements and placements[name].name in floats:
            yield name, f"holds {row.name}, where {type(module).__name__} has floating-point values"


def _misread(weight: PackedWeight, checkpoint: Checkpoint, method: str | None) -> str | None:
    """Return the reason why transformers would load wrong values for a weight, although transformers supports its quantisation
    method. Returns None if the values would be right. method: the `quant_method` in config.json.
    """
    name = printable(weight.codes)
    global_scale = weight.part("_global_scale")
    if weight.layout is COMPRESSED and ".experts." in weight.stem and global_scale in checkpoint.tensors:
        return f"transformers leaves out the scale {printable(global_scale)} of packed experts, so their values would be wrong"
    if method == "fp8" and weight.layout in (BLOCK_SCALED, DEEPSEEK_V4):
        declared = (checkpoint.config or {})["quantization_config"].get("weight_block_size")
        declared = declared if isinstance(declared, list) else ()
        shape = checkpoint.tensors[weight.codes].shape
        codes = checkpoint.tensors[weight.codes].dtype != "int8"
        uneven = codes and any(
            type(block) is int and block > 0 and extent % block and extent > block
            for extent, block in zip(shape[-2:], declared, strict=False)
        )
        if uneven:
            return (
                f"{name} is {list(shape)}, which is no whole number of its blocks of {declared[:2]}, and transformers spreads "
                "their scales wrongly"
            )
    return None


def _unpaired(parts: dict[str, str], weights: list[PackedWeight], checkpoint: Checkpoint) -> str | None:
    """Return a sentence about the first incomplete weight of a checkpoint with block scales, or None if every weight is complete. A
    weight is incomplete if the files have only its scale, or only its float8 codes.

    parts: the names of all tensors that belong to quantised weights, as keys. weights: the weights that have both codes and scales.
    """
    paired = {weight.scale for weight in weights} | {weight.codes for weight in weights}
    tensors = checkpoint.tensors
    for name in parts:
        if name.endswith(BLOCK_SCALED.scale) and name not in paired:
            weight = name.removesuffix(BLOCK_SCALED.scale)
            held = f"is {tensors[weight].dtype}" if weight in tensors else "is not there"
            return f"{printable(name)} has no weight to scale: {printable(weight)} {held}"
    if any(weight.layout is BLOCK_SCALED for weight in weights):
        for name, tensor in tensors.items():
            if name.endswith(".weight") and tensor.dtype == "float8_e4m3fn" and name not in paired:
                return f"{printable(name)} is float8 and its scale {printable(name)}{BLOCK_SCALED.scale} is not there"
    return None
