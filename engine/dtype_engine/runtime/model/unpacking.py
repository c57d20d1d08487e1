"""Unpacks the weights of checkpoints that compressed-tensors quantised: in float32 for the reference, rounded for the candidate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.packed_weights import COMPRESSED, PackedWeight, packed_weights
from dtype_engine.core import dtypes
from dtype_engine.core.block_formats import CODES, SCALE, TENSOR_SCALE
from dtype_engine.core.text import printable
from dtype_engine.core.tree import TensorInfo
from dtype_engine.core.units import plural
from dtype_engine.runtime.formats.code_packing import unpack_words
from dtype_engine.runtime.formats.quantize_blocks import from_file
from dtype_engine.runtime.model.live import LiveModel, Weight
from dtype_engine.runtime.model.mmap_reader import read_stored
from dtype_engine.runtime.model.name_mapping import Placement, map_names
from dtype_engine.runtime.model.packed_parts import in_rows
from dtype_engine.runtime.model.silence_libraries import quiet
from dtype_engine.runtime.model.stored_values import PlainValues
from dtype_engine.runtime.numerics.quantize import dequantize, dtype_name

_SHORT_FLOATS = (torch.bfloat16, torch.float16)


def unpack(live: LiveModel) -> None:
    """Make compressed-tensors unpack its weights now. By default, it unpacks them in the first forward pass, which may be
    cancelled.

    compressed-tensors multiplies codes by scales in the dtype of the scales. The scales are therefore cast to float32 before the
    weights are unpacked, and restored afterwards. NVFP4 weights and packed experts, which are always unpacked in 16 bits, are
    unpacked here a second time, in float32. The reference uses the float32 products. The candidate uses the products rounded to the
    dtype in which transformers has them.

    The layers are then set not to round their inputs, so that they behave like layers which this program has exported.
    """
    compressor = getattr(getattr(live.module, "hf_quantizer", None), "compressor", None)
    if compressor is None or not hasattr(live.module, "ct_decompress_hook"):
        return
    layers = {name: child for name, child in live.module.named_modules() if getattr(child, "quantization_scheme", None)}
    scales: dict[str, Any] = {name: getattr(child, "weight_scale", None) for name, child in layers.items()}
    stored = {name: scale.data for name, scale in scales.items() if scale is not None}
    wide = {name: _nvfp4(child) for name, child in layers.items() if hasattr(child, "weight_global_scale")}
    for name, data in stored.items():
        if data.dtype in _SHORT_FLOATS:
            scales[name].data = data.float()
    with quiet():
        compressor.decompress_model(live.module)
    live.module.requires_grad_(False)
    for name, data in stored.items():
        scales[name].data = data
        layer, weight = layers[name], layers[name].weight
        layer.quantization_enabled = False
        assert isinstance(weight, torch.Tensor)
        values = wide.get(name, weight.data)
        weight.data = weight.data.to(data.dtype if data.dtype in _SHORT_FLOATS else weight.dtype)
        _add(live, f"{name}.weight", weight, values)
    assert live.checkpoint is not None
    rounded = _widen_experts(live, live.checkpoint)
    if any(getattr(child.quantization_scheme, "input_activations", None) for child in layers.values()):
        live.notices += ("the inputs of quantised layers, which config.json declares as rounded, are not rounded here",)
    if rounded:
        live.notices += (
            f"transformers unpacks {plural(len(rounded), 'weight')} in 16 bits, first {printable(rounded[0])}, so the reference "
            "has this rounding as well",
        )


def _add(live: LiveModel, name: str, tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Add a weight to the model whose stored values are `values`, and whose current values in `tensor` may be these rounded."""
    info = TensorInfo(name, tuple(values.shape), dtype_name(values.dtype))
    live.by_id[id(tensor)] = Weight(info, tensor, PlainValues(values), dtype_name(tensor.dtype))


def _nvfp4(layer: torch.nn.Module) -> torch.Tensor:
    """Return the values of a layer whose weight is still packed in NVFP4: float32 [out, in]."""
    codes, scale, of_tensor = (
        getattr(layer, name).data for name in ("weight_packed", "weight_scale", "weight_global_scale")
    )
    parts = {CODES: codes, SCALE: scale, TENSOR_SCALE: of_tensor}
    shape = (codes.shape[0], codes.shape[1] * 2)
    return dequantize(*from_file(parts, shape, "nvfp4"), torch.float32, dtypes.BY_NAME["nvfp4"].blocks)


def _widen_experts(live: LiveModel, checkpoint: Checkpoint) -> list[str]:
    """Give the reference the float32 values of experts, which transformers unpacks in 16 bits and then stacks in one tensor of all
    experts. Returns the names, in the files, of the codes whose float32 values are not known.
    """
    experts = {weight.name: weight for weight in packed_weights(checkpoint.foreign) if ".experts." in weight.stem}
    held = live.module.state_dict(keep_vars=True)
    groups: dict[str, dict[str, Placement]] = {}
    for name, placement in map_names(live.module, experts).items():
        groups.setdefault(placement.name, {})[name] = placement
    rounded = []
    for live_name, places in groups.items():
        tensor = held[live_name]
        if tensor.dtype not in _SHORT_FLOATS:
            continue
        values = _stacked(checkpoint, {name: experts[name] for name in places}, places, tuple(tensor.shape))
        if values is None or not torch.equal(values.to(tensor.dtype), tensor.data):
            rounded += [experts[name].codes for name in places]
        else:
            _add(live, live_name, tensor, values)
    return rounded


def _stacked(
    checkpoint: Checkpoint,
    experts: Mapping[str, PackedWeight],
    places: Mapping[str, Placement],
    shape: tuple[int, ...],
) -> torch.Tensor | None:
    """Return the float32 values of a tensor of `shape` that loading stacks from `experts`, or None if some of them are stored in a
    form that is not decoded here. places: the place of each in the tensor.
    """
    decoded = {name: _decoded(checkpoint, weight) for name, weight in experts.items()}
    values = {name: each for name, each in decoded.items() if each is not None}
    if len(values) < len(decoded):
        return None
    rows = in_rows(places, {name: tuple(each.shape) for name, each in values.items()}, shape)
    return None if rows is None else torch.cat([values[name] for names in rows for name in names]).view(shape)


def _decoded(checkpoint: Checkpoint, weight: PackedWeight) -> torch.Tensor | None:
    """Return the values of an expert's weight in float32 [out, in]: packed integers, or codes of 8 bits, times the scales of groups
    in their rows. None if the weight is stored in another form.
    """
    files = checkpoint.foreign
    codes, scale = (read_stored(checkpoint, files[name]) for name in (weight.codes, weight.scale))
    if not scale.dtype.is_floating_point or scale.element_size() == 1 or codes.ndim != 2:
        return None
    if weight.layout is COMPRESSED:
        if codes.dtype != torch.int32 or weight.part("_shape") not in files:
            return None
        width = int(read_stored(checkpoint, files[weight.part("_shape")])[-1])
        codes = unpack_words(codes, width, 32 * codes.shape[1] // width)
    return codes.float() * scale.float().reshape(-1, scale.shape[-1]).repeat_interleave(
        codes.shape[1] // scale.shape[-1], 1
    )
