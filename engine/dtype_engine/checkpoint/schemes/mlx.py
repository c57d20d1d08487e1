"""Weights quantized by MLX, as mlx-lm writes them. `x` is a layer. `x.weight` holds codes in uint32 words. They are packed along
the last dimension without gaps, the first in the lowest bits.

The mode "affine" has integer codes of 1 to 8 bits. For each group, `x.scales` holds a scale, and `x.biases` holds a number that is
added. transformers writes the same for its method "metal", with the name `x.qbiases`. The modes "mxfp4", "mxfp8" and "nvfp4" have
floats as codes, and `x.scales` holds bytes. For "nvfp4" these are float8 numbers, and `x.global_scale` may hold a further scale.
For the other two they are exponents of two.

config.json gives the bits, group size and mode of the model, and those of modules that differ. The experts of a layer are stacked
in `switch_mlp`. Here, each expert is a weight of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import declared, mapping
from dtype_engine.checkpoint.schemes.layout import Config, Layout, PackedWeight, Shapes, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import FLOATS
from dtype_engine.checkpoint.schemes.scheme import CODES, MOST_EXPERTS, CodedWeight, Metadata, Scheme, Weights

_AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
_FLOAT_MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
"""Maps a mode with floats as codes to (bits of a code, number of codes in a group)."""
_STACKED = ".switch_mlp."
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""Maps MLX's names of an expert's weights to the names in models whose experts are in `block_sparse_moe`."""


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    for name, scale in tensors.items():
        if not name.endswith(".scales"):
            continue
        module = name.removesuffix(".scales")
        codes = tensors.get(f"{module}.weight")
        if codes is None or codes.dtype != "uint32":
            continue
        described = _described(config, module, codes, scale)
        parts = {CODES: codes, "scale": scale}
        if described is None:
            continue
        mode, bits, size = described
        if mode == "affine":
            bias = tensors.get(f"{module}.biases") or tensors.get(f"{module}.qbiases")
            if bias is None or bias.shape != scale.shape or bias.dtype not in FLOATS:
                continue
            parts["bias"] = bias
        whole = tensors.get(f"{module}.global_scale")
        if whole is not None:
            if mode != "nvfp4" or whole.shape != codes.shape[:-2] or whole.dtype != "float32":
                continue
            parts["global_scale"] = whole
        kind = f"affine{bits}@g{size}" if mode == "affine" else mode
        shape = (*codes.shape[:-1], codes.shape[-1] * 32 // bits)
        weight = CodedWeight(codes.name, shape, SCHEME, f"{SCHEME.name}:{kind}", parts, {"mode": mode, "bits": bits})
        stacked = _STACKED in name and len(shape) == 3 and shape[0] <= MOST_EXPERTS
        yield from _experts(weight) if stacked else (weight,)


def _settings_of(config: Config, module: str) -> tuple[str, Any, Any]:
    """Return (mode, bits, group size) of a module in config.json, such as ("affine", 4, 64). Bits and size may have any type."""
    whole = mapping(config.get("quantization")) or declared(config)
    own = mapping(whole.get(module)) or whole
    mode = str(own.get("mode", "affine"))
    usual = _FLOAT_MODES.get(mode, (4, 64))
    return mode, own.get("bits", usual[0]), own.get("group_size", usual[1])


def _described(
    config: Config, module: str, codes: CheckpointTensor, scale: CheckpointTensor
) -> tuple[str, int, int] | None:
    """Return (mode, bits, group size) of a module, or None if the shapes or dtypes of its codes and scales contradict them."""
    mode, bits, size = _settings_of(config, module)
    if mode == "affine":
        fits = scale.dtype in FLOATS and bits in _AFFINE_BITS
    else:
        fits = mode in _FLOAT_MODES and scale.dtype == "uint8" and (bits, size) == _FLOAT_MODES[mode]
    if not fits or type(bits) is not int or type(size) is not int or size < 1:
        return None
    if len(codes.shape) not in (2, 3) or codes.shape[:-1] != scale.shape[:-1] or not codes.nbytes:
        return None
    return (mode, bits, size) if 32 * codes.shape[-1] == scale.shape[-1] * size * bits else None


def _experts(stacked: CodedWeight) -> Iterator[CodedWeight]:
    """Yield a weight for each expert of a stacked weight. Its tensors are parts of the stacked tensors."""
    layer, _, local = stacked.name.partition(_STACKED)
    projection = local.removesuffix(".weight")
    if layer.endswith(".block_sparse_moe"):
        projection = _MIXTRAL.get(projection, projection)
    for expert in range(stacked.shape[0]):
        parts = {role: part.at(expert) for role, part in stacked.parts.items()}
        name = f"{layer}.experts.{expert}.{projection}.weight"
        yield replace(stacked, name=name, shape=stacked.shape[1:], parts=parts)


def _scale_shapes(weight: PackedWeight, tensors: Tensors, config: Config) -> Shapes:
    codes = tensors[weight.codes].shape
    _, bits, size = _settings_of(config, weight.stem.removesuffix("."))
    if len(codes) < 2 or any(type(number) is not int or number < 1 for number in (bits, size)):
        return ()
    return ((*codes[:-1], -(-32 * codes[-1] // (bits * size))),)


_LAYOUT = Layout(
    "packed by MLX", "weight", "scales", frozenset({"uint32"}), ("biases", "qbiases"), exponents=True, signed=True,
    scale_shapes=_scale_shapes,
    part_shapes=lambda weight, tensors, _: dict.fromkeys(("biases", "qbiases"), tensors[weight.scale].shape),
)  # fmt: skip
SCHEME = Scheme("mlx", "mlx", _read, (_LAYOUT,), fused=False)
