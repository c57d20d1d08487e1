"""Calibration inputs: batches, each with the arguments of one forward pass of the reference and of the candidate."""

from dtype_engine.runtime.inputs.batch import Batch, Inputs, from_values, one_of_each_shape, summarize
from dtype_engine.runtime.inputs.build import make_inputs
from dtype_engine.runtime.inputs.preprocessing import running, tokenizer_of

__all__ = ["Batch", "Inputs", "from_values", "make_inputs", "one_of_each_shape", "running", "summarize", "tokenizer_of"]
