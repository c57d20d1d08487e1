"""Weights in MXFP4, as gpt-oss stores its experts. `x` is a parameter of the model.

`x_blocks`, uint8 [experts, out, blocks, 16], holds two e2m1 values in each byte. `x_scales`, uint8 [experts, out, blocks], holds an
exponent of two for each block of 32 values. The model's parameter `x` has the shape [experts, in, out].
"""

from __future__ import annotations

from msgspec.structs import replace

from dtype_engine.checkpoint.schemes.configuration import declared
from dtype_engine.checkpoint.schemes.layout import Config, Layout, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import EXPONENTS, describe
from dtype_engine.checkpoint.schemes.scheme import CODES, Metadata, Scheme, Weights

_BYTES = 16
"""The bytes of a block of 32 values, which are the last dimension of the codes."""


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    if declared(config).get("quant_method") not in ("mxfp4", None):
        return
    for name, codes in tensors.items():
        stem = name.removesuffix("_blocks")
        if stem == name or codes.dtype != "uint8" or len(codes.shape) != 4 or codes.shape[3] != _BYTES:
            continue
        experts, rows, blocks, _ = codes.shape
        stored, settings = (experts, rows, 2 * _BYTES * blocks), {"code": "e2m1", "transposed": True}
        parts = {CODES: codes, "scale": tensors.get(f"{stem}_scales")}
        weight = describe(stem, SCHEME, "mxfp4", stored, (1, 2 * _BYTES), parts, scales=EXPONENTS, settings=settings)
        yield weight and replace(weight, shape=(experts, stored[2], rows))


_LAYOUT = Layout(
    "MXFP4 (gpt-oss)", "_blocks", "_scales", frozenset({"uint8"}), orphans=("_proj_scales",), exponents=True,
    scale_shapes=lambda weight, tensors, config: (tensors[weight.codes].shape[:-1],),
)  # fmt: skip
SCHEME = Scheme("gpt-oss", "block_scaled", _read, (_LAYOUT,))
