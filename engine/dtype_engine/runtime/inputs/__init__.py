"""Calibration inputs: what the reference and the candidate are run on, one call of the model at a time.

`build` decides what suits a model; `text`, `images`, `audio` and `multimodal` make it, with the preprocessing that the model's
folder has; `tensor_files` reads a forward pass's own arguments from a file, which `validate` checks.
"""

from dtype_engine.runtime.inputs.batch import Batch, Inputs, from_values
from dtype_engine.runtime.inputs.build import make_inputs
from dtype_engine.runtime.inputs.preprocessing import tokenizer_of
from dtype_engine.runtime.inputs.summary import one_of_each_shape, summarize

__all__ = ["Batch", "Inputs", "from_values", "make_inputs", "one_of_each_shape", "summarize", "tokenizer_of"]
