"""Round-trip errors beside the bare cast. A module of its own, since it runs in a new process."""

from __future__ import annotations

from functools import partial

from tests.helpers.peak_memory import peak_anonymous

from .rows import Row, median_of_ratios


def round_trips() -> list[Row]:
    """What `weights` prints."""
    import torch

    from dtype_engine.runtime.formats.dequantize import torch_dtype
    from dtype_engine.runtime.numerics.quantization_error import round_trip

    rows = []
    tensor = torch.randn(200 * 2**20 // 4 // 4096, 4096).mul_(0.02)
    for dtype in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", *_FORMATS):
        target = torch.bfloat16 if dtype in _FORMATS else torch_dtype(dtype)
        error = partial(round_trip, "w", tensor, dtype)
        ratio = 1 / median_of_ratios(error, partial(tensor.to, target), 7)
        what = f"bare cast to {target} / round-trip error in {dtype}, at least {_SHARE.get(dtype, 0):g}"
        rows.append(Row(what, ratio, "x", least=_SHARE.get(dtype)))
        rows.append(Row(f"memory for the error in {dtype}", peak_anonymous(error) / 2**20, "MiB", 64))
    return rows


_FORMATS = ("mxfp8", "mxfp4", "nvfp4", "fp8@128x128", "int4@g128", "int4@g128a")
_SHARE = {"bfloat16": 0.4, "float16": 0.4, "float8_e4m3fn": 0.25, "float8_e5m2": 0.25} | dict.fromkeys(_FORMATS, 0.1)
