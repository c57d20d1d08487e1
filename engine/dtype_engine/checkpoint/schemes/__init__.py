"""The quantization schemes: the ways in which programs store weights that they quantized. There is a module for each.

A scheme (`scheme.py`) knows the tensors of its weights (`layout.py`), and describes the weights from the headers of all tensors. It
reads the values only of small tensors, such as one that holds a shape. It yields the weights whose tensors are all there and have
the dtypes and shapes that the scheme requires. Tensors that no scheme recognizes are handled like those of an unknown scheme, and
`check` reports those that seem to belong to a weight. The decoders are in `runtime/formats/schemes`.
"""

from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight

__all__ = ["CODES", "CodedWeight"]
