"""Exporting: writing a checkpoint in the dtypes of a recipe, shard by shard.

An exported folder is an ordinary checkpoint with the tensor names of the source: `config.json`, the weights in safetensors files,
and the tokenizer and processor files. Its `recipe.yaml` and `README.md` state which tensors were cast and how to load the folder.
"""

from dtype_engine.runtime.export.contents import Contents
from dtype_engine.runtime.export.export import export
from dtype_engine.runtime.export.plan import of_checkpoint, of_live

__all__ = ["Contents", "export", "of_checkpoint", "of_live"]
