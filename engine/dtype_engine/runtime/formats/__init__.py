"""Formats whose scales belong to blocks of a weight. What each is without torch stands in `core.block_formats` and `core.dtypes`.

A file a family says how scales follow from a block's values: `mx`, `nvfp4`, `fp8_blocks`, `grouped_ints`. `elements` rounds to
4, 6 and 8 bit floats and packs codes into bytes; `blocks` quantizes some rows of a weight; `tensors` does it for a whole one.
"""
