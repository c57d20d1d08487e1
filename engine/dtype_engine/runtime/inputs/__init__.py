"""Calibration inputs: batches, each with the arguments of one forward pass of the reference and of the candidate.

`build` chooses the kind of input for a model. `text`, `images`, `audio` and `multimodal` create the inputs, with the preprocessing
in the model's folder. `tensor_files` reads the arguments of the forward pass from a file, and `validate` checks these arguments.
"""

from dtype_engine.runtime.inputs.batch import Batch, Inputs, from_values
from dtype_engine.runtime.inputs.build import make_inputs
from dtype_engine.runtime.inputs.preprocessing import running, tokenizer_of
from dtype_engine.runtime.inputs.summary import one_of_each_shape, summarize

__all__ = ["Batch", "Inputs", "from_values", "make_inputs", "one_of_each_shape", "running", "summarize", "tokenizer_of"]
