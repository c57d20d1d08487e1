"""Recognizes weights that other programs quantized: which tensors of a file (codes, scales, ...) form such a weight, and how many
parameters they represent. These tensors are never cast.

A weight is recognized by the names that a scheme (`checkpoint/schemes`) gives to its tensors, and by the dtype of the codes. Other
tensors are recognized by names that programs often use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable

if TYPE_CHECKING:
    from dtype_engine.checkpoint.schemes.layout import PackedWeight

NOT_CODES = frozenset({"float64", "float32", "bfloat16", "float16", "int64", "bool"})
"""The dtypes of plain weights. Every quantized weight has a tensor of another dtype: its codes, or one that describes them."""
_SCALE_WORD = re.compile(
    r"scal(e|ing)|zero|absmax|quant|codebook|g_idx|_shift|^q?biases$|^s$|^S[UV]$|^smooth_|^weight_bias$|^(proj|lora)_(up|down)$"
)
"""Matches the last part of a tensor's name if the tensor belongs to quantized codes, as `weight_scale` and `qzeros` do."""
_TABLE_WORD = re.compile(r"centroids|codebook")
"""Matches the name of a module with a table of values for the codes of its parent, such as VPTQ's `x.centroids` for `x`."""
_OF_INPUTS = re.compile(r"(^|_)([kvq]|kv|input|output|activation)_scale$|scale_input$|_act$")
"""Matches the last part of a scale's name if the scale belongs to inputs, outputs or the key-value cache, not to codes."""
OF_ACTIVATIONS = "is a scale of activations or of the key-value cache by its name"
"""The reason, for the user, why scales whose names match `_OF_INPUTS` are not cast."""
Count = int | Literal["unknown"] | None
"""The number of parameters that a tensor represents. None means one for each element of the tensor."""


class Stored(Protocol):
    """A tensor in a file."""

    @property
    def dtype(self) -> str:
        """torch's name of the tensor's dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape in the file."""


def packed_weights(tensors: Mapping[str, Stored]) -> list[PackedWeight]:
    """Return the weights with codes and scales that other programs quantized, recognized by names and dtypes of tensors."""
    if are_plain(tensors):
        return []
    from dtype_engine.checkpoint.schemes.layout import PackedWeight
    from dtype_engine.checkpoint.schemes.registry import layouts

    found, tried = [], layouts()
    scales = tuple({layout.scale for layout in tried})
    for name in tensors:
        if not name.endswith(scales):
            continue
        for layout in tried:
            if not name.endswith(layout.scale):
                continue
            stem = name[: -len(layout.scale)]
            codes = tensors.get(stem + layout.codes)
            if codes is None or codes.dtype not in layout.dtypes or stem + layout.codes == name:
                continue
            weight = PackedWeight(layout, stem)
            if not layout.mark or weight.module + layout.mark in tensors:
                found.append(weight)
                break
    return found


def are_plain(tensors: Mapping[str, Stored]) -> bool:
    """Return whether dtypes and names alone show that no tensor is quantized, to save the import of the schemes (milliseconds)."""
    return all(name.endswith((".weight", ".bias")) and each.dtype in NOT_CODES for name, each in tensors.items())


def quantized_parts(tensors: Mapping[str, Stored], config: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the names of the tensors (codes, scales, ...) of weights that other programs quantized. Each is mapped to the reason
    why it is never cast, in words for the user. The reason names the method that `config`, the content of config.json, declares.
    """
    if are_plain(tensors):
        return {}
    from dtype_engine.checkpoint.schemes.layout import CODES_DTYPES, FLOAT8
    from dtype_engine.checkpoint.schemes.registry import layouts

    described = _declared_scheme(config)
    alone = {end: layout for layout in layouts() for end in layout.alone}
    ends = tuple(alone)
    found: dict[str, str] = {}
    for weight in packed_weights(tensors):
        why = f"part of a weight that is {described or weight.layout.what}"
        found |= {name: why for name in weight.names if name in tensors}
    in_module: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if name in found:
            continue
        if name.endswith(ends):
            layout = next(alone[end] for end in ends if name.endswith(end))
            found[name] = f"part of a weight that is {described or layout.what}"
        elif tensor.dtype == "float8_e8m0fnu":
            found[name] = "holds exponents of two (E8M0), which are the scales of a quantized weight"
        elif tensor.dtype in CODES_DTYPES and len(tensor.shape) > 1:
            in_module.setdefault(name.rpartition(".")[0], []).append(name)
    holders = {
        name.rpartition(".")[0]: name
        for name, each in tensors.items()
        if each.dtype in CODES_DTYPES and len(each.shape) > 1
    }
    for name in tensors if holders else ():
        module, _, local = name.rpartition(".")
        if module not in holders and _TABLE_WORD.search(module.rpartition(".")[2]):
            module, local = module.rpartition(".")[0], "codebook"
        if name in found or holders.get(module) == name:
            continue
        if module in holders and _SCALE_WORD.search(local):
            codes = holders[module]
            held = dtypes.short_name(tensors[codes].dtype)
            found[name] = f"belongs to {codes.rpartition('.')[2]} by its name, which holds {held} codes"
            for other in in_module.get(module, ()) if not _OF_INPUTS.search(local) else ():
                if tensors[other].dtype in FLOAT8:  # codes of other dtypes are never cast
                    found.setdefault(other, f"holds {held} codes, to which {printable(local)} belongs by its name")
        elif _OF_INPUTS.search(local):
            found[name] = OF_ACTIVATIONS
    return found


def output_scales(tensors: Mapping[str, Stored]) -> dict[str, str]:
    """Return the names of the scales and zero points with which modules of torch.ao quantize their outputs, as in a state dict
    after `quantize_dynamic`. Each is mapped to the reason why it is never cast.
    """
    found: dict[str, str] = {}
    for name, zero in tensors.items():
        module, dot, local = name.rpartition(".")
        scale = tensors.get(f"{module}{dot}scale") if local == "zero_point" else None
        if scale is None or zero.dtype != "int64" or scale.dtype != "float32":
            continue
        if scale.shape == zero.shape and scale.shape in ((), (1,)):
            pair = f"{module}{dot}scale", name
            found |= dict.fromkeys(pair, "belongs to a module that is quantized by torch, as a number for its outputs")
    return found


def is_of_activations(name: str) -> bool:
    """Return whether a tensor's name shows that it is a scale of activations or of the KV cache."""
    return _OF_INPUTS.search(name.rpartition(".")[2]) is not None


def parameters_meant(tensors: Mapping[str, Stored], parts: Iterable[str]) -> dict[str, Count]:
    """Return how many parameters each of `parts`, the tensors of quantized weights, represents: for codes, None (one for each
    element) or "unknown" (elements may hold several codes); for all other tensors, 0.
    """
    counts: dict[str, Count] = dict.fromkeys(parts, 0)
    if not counts:
        return {}
    from dtype_engine.checkpoint.schemes.registry import layouts

    found = {weight.codes: weight.layout for weight in packed_weights(tensors)}
    alone = {layout.codes: layout for layout in layouts() if layout.codes not in ("", "weight")}
    ends = tuple(alone)
    for name in counts:
        layout = found.get(name)
        if layout is None and name.endswith(ends):
            layout = next(alone[end] for end in ends if name.endswith(end))
        if layout is not None:
            dtype = tensors[name].dtype
            counts[name] = None if dtype.startswith(("float8", "int8")) and not layout.several else "unknown"
    return counts


def _declared_scheme(config: Mapping[str, Any] | None) -> str | None:
    """Return what config.json declares, in words that complete "a weight that is ...", such as "quantized by gptq, 4 bit", or None
    if it declares nothing.
    """
    declared = (config or {}).get("quantization_config")
    method = declared.get("quant_method") if isinstance(declared, Mapping) else None
    if not declared or not method:
        return None
    bits = declared.get("bits") or (4 if declared.get("load_in_4bit") else 8 if declared.get("load_in_8bit") else None)
    if method == "fp8" and declared.get("weight_block_size"):
        return "fp8 with block scales"
    return f"quantized by {printable(str(method), 40)}" + (f", {bits} bit" if isinstance(bits, int) else "")


def names_of_parts(weights: Iterable[PackedWeight], tensors: Mapping[str, Stored]) -> set[str]:
    """Return the names of all tensors of a file that store one of the given weights: codes, scales, zero points and so on."""
    return {name for weight in weights for name in weight.names if name in tensors}
