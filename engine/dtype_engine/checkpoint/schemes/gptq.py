"""Weights in GPTQ's layout, as AutoGPTQ, GPTQModel and AutoRound write it. `x` is a layer.

`x.qweight` [in * bits / 32, out] holds codes of 2, 3, 4 or 8 bits, packed along the inputs without gaps, the first in the lowest
bits. `x.qzeros` [groups, out * bits / 32] holds zero points, packed along the outputs. The first version of the format stores each
zero point minus one. `x.scales` [groups, out] holds the scales. `x.g_idx` [in] is optional and holds the group of each input.

The format `gptq_p` of GPTQModel stores codes and zero points of 3, 5, 6 or 7 bits in planes, in as many words. 32 successive codes
take one word for each of their bits. First come the words with the lowest bits of all codes, two of each with 3 bits, otherwise
four. Then come the words with the next bits (GPTQModel, `docs/gptq_planar.md` and `utils/planar_packing.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import (
    block_name,
    declared,
    declared_numbers,
    declared_values,
    group_size,
    quant_method,
)
from dtype_engine.checkpoint.schemes.layout import WORDS, Config, Layout, PackedWeight, Shapes, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import packed_words
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Declared, Metadata, Scheme, Weights

_BITS = (2, 3, 4, 8)
_PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
"""Maps the bits of a code in `gptq_p` to the widths of its planes, from the lowest bits on. Other codes are not split."""
_PLANAR = ("gptq", "gptq_p")
_ADDED = {
    ("gptq", "gptq"): 1, ("gptq", "gptq_v2"): 0, _PLANAR: 0,
    ("auto-round", "auto_round:auto_gptq"): 1, ("auto-round", "auto_round:gptq"): 1, ("auto-round", "auto"): 1,
    ("auto-round", "auto_round"): 0, ("auto-round", "auto_round:gptqmodel"): 0,
}  # fmt: skip
"""Maps (method, format) to the number that the decoder adds to each stored zero point. Other formats do not use this layout."""


def _format(settings: Config) -> tuple[str, str]:
    """Return the declared (method, format)."""
    method = quant_method(settings)
    usual = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    return method, str(settings.get("packing_format") if method == "auto-round" else usual)


def _widths(settings: Config) -> set[int]:
    """Return the bits of a code that the declared format may have."""
    return {*_BITS, *(_PLANES if _format(settings) == _PLANAR else ())}


def _covers(settings: Config) -> bool:
    """Return whether `_read` reads all weights with these settings (see `Declared.covers`). It needs codes in int32 words."""
    widths = declared_numbers(settings, "bits")
    in_words = settings.get("pack_dtype", "int32") == "int32"  # GPTQModel can pack codes in other words
    return _format(settings) in _ADDED and in_words and bool(widths) and widths <= _widths(settings)


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    settings = declared(config)
    method, added = quant_method(settings), _ADDED.get(_format(settings))
    if added is None:
        return
    widths, sizes = declared_numbers(settings, "bits") & _widths(settings), declared_numbers(settings, "group_size")
    planes = _PLANES if _format(settings) == _PLANAR else {}
    for stem, codes, scale, zero in packed_words(tensors):
        order = tensors.get(f"{stem}g_idx")
        groups, rows = scale.shape
        bits = 32 * zero.shape[1] // rows if rows else 0
        if bits not in widths:
            continue
        columns = 32 * codes.shape[0] // bits
        size = group_size(sizes, columns, groups)
        grid = codes.shape == (columns * bits / 32, rows) and zero.shape == (groups, rows * bits / 32)
        if size is None or not grid or (order is not None and (order.shape, order.dtype) != ((columns,), "int32")):
            continue
        if bits in planes and (columns % 32 or rows % 32):
            continue
        form = f"{method}:int{bits}@{block_name(size, columns)}"
        numbers = {"bits": bits, "group": size, "added": added, "planes": planes.get(bits, (bits,))}
        parts = {CODES: codes, "scale": scale, "zero": zero} | ({} if order is None else {"g_idx": order})
        yield CodedWeight(f"{stem}weight", (rows, columns), SCHEME, form, parts, numbers)


def _needed_parts(settings: Config) -> tuple[tuple[str, str], ...]:
    return (("g_idx", "config.json declares ordered columns (desc_act)"),) if settings.get("desc_act") is True else ()


def _zero_points(weight: CodedWeight, settings: Config) -> tuple[CheckpointTensor, bytes] | None:
    """Return (zero points, the bytes of the middle code, which each row must repeat) if codes are symmetric, otherwise None."""
    given, bits = declared_values(settings, "sym"), weight.settings["bits"]
    if not given or any(each is not True for each in given):
        return None
    middle, pattern = (1 << (bits - 1)) - weight.settings["added"], b""
    for width in weight.settings["planes"]:
        low, middle = middle & ((1 << width) - 1), middle >> width
        of_plane = sum(low << (width * place) for place in range(32))  # 32 of them end at the end of a word
        pattern += of_plane.to_bytes(4 * width, "little")
    return weight.parts["zero"], pattern


def _shape(weight: PackedWeight, tensors: Tensors, config: Config) -> tuple[int, int, int] | None:
    """Return (groups, inputs, outputs) of a weight, or None if unknown. GPTQ packs along inputs, AWQ along outputs."""
    settings, codes = declared(config), tensors[weight.codes]
    bits, size, zeros = settings.get("bits"), settings.get("group_size"), tensors.get(weight.part("qzeros"))
    if zeros is None or codes.dtype == "int16" or len(codes.shape) < 2:
        return None
    if type(bits) is not int or type(size) is not int or bits < 1:
        return None
    rows, columns = codes.shape[:2]
    is_awq = zeros.shape[-1:] == codes.shape[-1:]
    inputs, outputs = (rows, columns * 32 // bits) if is_awq else (rows * 32 // bits, columns)
    return -(-inputs // size) if size > 0 else 1, inputs, outputs


def _scale_shapes(weight: PackedWeight, tensors: Tensors, config: Config) -> Shapes:
    shape = _shape(weight, tensors, config)
    return () if shape is None else ((shape[0], shape[2]),)


def _part_shapes(weight: PackedWeight, tensors: Tensors, config: Config) -> Mapping[str, tuple[int, ...]]:
    shape = _shape(weight, tensors, config)
    if shape is None:
        return {}
    groups, inputs, outputs = shape
    return {"g_idx": (inputs,), "qzeros": (groups, outputs * declared(config)["bits"] // 32)}


_LAYOUT = Layout(
    "packed by GPTQ or AWQ", "qweight", "scales", WORDS | {"int16"}, ("qzeros", "g_idx", "bias_scales", "scaled_zeros"),
    alone=(".qweight", ".qzeros"), orphans=(".qzeros",), signed=True, scale_shapes=_scale_shapes, part_shapes=_part_shapes,
    # AWQ's "gemv" and "gemv_fast" pad the scales to whole words. The latter may name the zero points otherwise.
    padded=lambda codes, scale: scale.shape[:1] == codes.shape[:1] or codes.dtype == "int16",
    required=lambda codes, scale: () if codes.dtype == "int16" else ("qzeros",),
)  # fmt: skip
SCHEME = Scheme(
    "gptq", "gptq", _read, (_LAYOUT,), settings_files=("quantize_config.json", "quantization_config.json"),
    declared=Declared(
        _covers, lambda settings: quant_method(settings) in ("gptq", "auto-round"), _needed_parts, _zero_points,
    ),
)  # fmt: skip
