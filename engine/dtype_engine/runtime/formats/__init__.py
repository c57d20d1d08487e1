"""Quantization formats in which each block of a weight has its own scale. `core.block_formats` and `core.dtypes` describe these
formats without torch.

For each family of formats, a file computes scales from the values of a block: `mx`, `nvfp4`, `fp8_blocks`, `grouped_ints`.
`code_packing` rounds to floats of 4, 6 and 8 bits and packs codes into bytes. `blocks` quantizes some rows of a weight,
`quantize_blocks` a whole weight.
"""
