"""Weights of Gemma that config.json declares with `quant_method: gemma`, which transformers loads since 5.23
(`transformers/integrations/gemma_quant.py`). `x` is a module.

A linear layer has its codes in `x.weight`, and `x.weight_scale` [out, 1] holds a scale for each row. An embedding has its codes in
`x.embedding_quantized`, and `x.embedding_scale` [rows, groups] holds a scale for each group of a row. Codes of 8 bits are int8.
Codes of 4 and 2 bits are stored plus 2^(bits-1), packed in uint8 along the row, the first in the lowest bits. config.json declares
their bits: `num_bits`, or for some modules `module_quant_configs`, whose keys are regular expressions.

`x.input_activation_scale` and `x.output_activation_scale` are scales of the layer's inputs and outputs, or 0 if there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dtype_engine.checkpoint.schemes.configuration import declared, mapping, quant_method, size
from dtype_engine.checkpoint.schemes.layout import BYTES, Config, Layout, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import describe
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Metadata, Scheme, Weights
from dtype_engine.core.errors import PatternError
from dtype_engine.core.regexes import compile_regex

_BITS = 4
"""The bits of a packed code if config.json does not declare them."""
_NAMES = {".weight_scale": ".weight", ".embedding_scale": ".embedding_quantized"}
"""Maps the ends of the names of scales to those of codes."""


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    settings = declared(config)
    if quant_method(settings) != SCHEME.name:
        return
    modules = _of_modules(mapping(settings.get("module_quant_configs")))
    for name in tensors:
        for end, codes in _NAMES.items():
            module = name.removesuffix(end)
            if module != name and module + codes in tensors:
                found = {bits for matches, bits in modules if matches(module)}
                usual = size(settings.get("num_bits", _BITS)) or 0
                yield _weight(module, codes, end, found or {usual}, tensors)


def _of_modules(settings: Mapping[str, Any]) -> list[tuple[Callable[[str], bool], int]]:
    """Return (whether the settings hold for a module, bits of its codes) for each entry of `module_quant_configs`."""
    found = []
    for pattern, own in settings.items():
        bits = size(mapping(own).get("num_bits"))
        try:
            matches = compile_regex(pattern, pattern, "search", dotall=False)
        except PatternError:
            continue
        if bits is not None:
            found.append((matches, bits))
    return found


def _weight(module: str, codes_end: str, scale_end: str, found: set[int], tensors: Tensors) -> CodedWeight | None:
    """Return the weight of a module. found: the bits that the settings give to its packed codes. There is no weight if they give it
    several.
    """
    codes, scale = tensors[module + codes_end], tensors[module + scale_end]
    bits = 8 if codes.dtype == "int8" else found.pop() if len(found) == 1 else 0
    if codes.dtype not in BYTES or bits not in (2, 4, 8) or (codes.dtype == "uint8") != (bits != 8):
        return None
    if len(codes.shape) != 2 or len(scale.shape) != 2 or not scale.nbytes:
        return None
    columns = codes.shape[1] * 8 // bits
    if columns % scale.shape[1]:
        return None
    block = "channel" if scale.shape[1] == 1 else (1, columns // scale.shape[1])
    settings = {} if bits == 8 else {"code": "words", "bits": bits, "dense": True}
    parts = {CODES: codes, "scale": scale}
    shape = (codes.shape[0], columns)
    return describe(f"{module}.weight", SCHEME, f"int{bits}", shape, block, parts, settings=settings)


_LAYOUT = Layout(
    "an embedding of quantized Gemma", ".embedding_quantized", ".embedding_scale", BYTES, alone=(".embedding_quantized",),
    orphans=(".embedding_scale",),
)  # fmt: skip
_ACTIVATIONS = (".input_activation_scale", ".output_activation_scale")
SCHEME = Scheme(
    "gemma", "block_scaled", _read, (_LAYOUT,), beside=_ACTIVATIONS, of_inputs=_ACTIVATIONS[:1],
    ignored=("modules_to_not_convert",), ignored_by=("gemma",),
)  # fmt: skip
