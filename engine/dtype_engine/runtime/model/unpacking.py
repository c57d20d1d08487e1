"""Unpacks the weights of checkpoints that compressed-tensors quantised: in float32 for the reference, rounded for the candidate."""

from __future__ import annotations

from typing import Any

import torch

from dtype_engine.checkpoint.packed_weights import COMPRESSED, packed_weights
from dtype_engine.core.text import printable
from dtype_engine.core.tree import TensorInfo
from dtype_engine.core.units import plural
from dtype_engine.runtime.model.live import LiveModel, Weight
from dtype_engine.runtime.model.silence_libraries import quiet
from dtype_engine.runtime.numerics.quantize import dtype_name

_SHORT_FLOATS = (torch.bfloat16, torch.float16)


def unpack(live: LiveModel) -> None:
    """Make compressed-tensors unpack its weights now. By default, it unpacks them in the first forward pass, which may be
    cancelled.

    compressed-tensors multiplies codes by scales in the dtype of the scales. The scales are therefore cast to float32 before the
    weights are unpacked, and restored afterwards. The reference uses the float32 products. The candidate uses the products rounded
    to the stored dtype of the scales, as transformers does.

    The layers are then set not to round their inputs, so that they behave like layers which this program has exported.
    """
    compressor = getattr(getattr(live.module, "hf_quantizer", None), "compressor", None)
    if compressor is None or not hasattr(live.module, "ct_decompress_hook"):
        return
    layers = {name: child for name, child in live.module.named_modules() if getattr(child, "quantization_scheme", None)}
    scales: dict[str, Any] = {name: getattr(child, "weight_scale", None) for name, child in layers.items()}
    stored = {name: scale.data for name, scale in scales.items() if scale is not None}
    for name, data in stored.items():
        if data.dtype in _SHORT_FLOATS:
            scales[name].data = data.float()
    with quiet():
        compressor.decompress_model(live.module)
    live.module.requires_grad_(False)
    assert live.checkpoint is not None
    files = live.checkpoint.foreign
    experts = [weight for weight in packed_weights(files) if ".experts." in weight.stem]  # transformers unpacks these
    rounded = [
        weight.codes
        for weight in experts
        if (held := files[weight.scale].dtype) in ("bfloat16", "float16")
        or (weight.layout is COMPRESSED and held != "uint8")
    ]
    for name, data in stored.items():
        scales[name].data = data
        layer, weight = layers[name], layers[name].weight
        layer.quantization_enabled = False
        assert isinstance(weight, torch.Tensor)
        values = weight.data
        dtype = data.dtype if data.dtype in _SHORT_FLOATS else values.dtype
        weight.data = values.to(dtype)
        info = TensorInfo(f"{name}.weight", tuple(values.shape), dtype_name(values.dtype))
        live.by_id[id(weight)] = Weight(info, weight, values, dtype_name(dtype))
        if values.dtype in _SHORT_FLOATS and data.dtype.is_floating_point:
            rounded.append(f"{name}.weight")
    if any(getattr(child.quantization_scheme, "input_activations", None) for child in layers.values()):
        live.notices += ("the inputs of quantised layers, which config.json declares as rounded, are not rounded here",)
    if rounded:
        live.notices += (
            f"transformers unpacks {plural(len(rounded), 'weight')} in 16 bits, first {printable(rounded[0])}, so the reference "
            "has this rounding as well",
        )
