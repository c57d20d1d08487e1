"""The formats that files store, by where their scales are: one test each, without those that differ only in a rounding."""

from __future__ import annotations

from dtype_engine.core import dtypes

BLOCKS = tuple(name for name in dtypes.STORED_FORMATS if name in dtypes.BLOCK_FORMATS)
WHOLE = tuple(name for name in dtypes.STORED_FORMATS if name in dtypes.WHOLE_SCALE_DTYPES)
