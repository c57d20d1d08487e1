"""Formats in which each block of a weight has its own scale. `core.block_formats` and `core.dtypes` describe them without torch.

Each family of formats has a file that computes scales from the values of a block: `mx`, `nvfp4`, `fp8_blocks`, `grouped_ints`.
`code_packing` rounds to floats of 4, 6 and 8 bits and packs codes into bytes. `blocks` quantizes some rows of a weight,
`quantize_blocks` a whole weight.
"""
