"""Readers that find out which tensors of a checkpoint (codes, scales, ...) form one quantized weight. There is a file for each
quantization scheme, that is, for each way in which programs store such weights.

A reader gets the headers of all tensors. Of the values, it reads only small tensors, such as one that holds a shape. It returns the
weights whose tensors are all there and have the dtypes and shapes that the scheme requires. Tensors that no reader recognizes are
handled like those of an unknown scheme, and `check` reports those that seem to belong to a weight. The decoders are in
`runtime/formats/schemes`.
"""

from dtype_engine.checkpoint.schemes.encoded_weight import CODES, EncodedWeight, read_small

__all__ = ["CODES", "EncodedWeight", "read_small"]
