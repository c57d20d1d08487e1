"""Formats whose scales belong to blocks of a weight. What each is without torch stands in `core.block_formats` and `core.dtypes`.

A file a family says how scales follow from a block's values: `mx`, `nvfp4`, `fp8_blocks`, `grouped_ints`. `code_packing` rounds to
4, 6 and 8 bit floats and packs codes into bytes; `blocks` quantizes some rows of a weight, `quantize_blocks` a whole one.
"""
