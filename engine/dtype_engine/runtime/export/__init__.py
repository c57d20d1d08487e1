"""Exporting: writing a checkpoint in the dtypes of a recipe, shard by shard.

An exported folder is an ordinary checkpoint whose tensors have the names of the source: `config.json`, the weights in safetensors,
and the files of the tokenizer and the processor. `recipe.yaml` and `README.md` say what was cast and how to load the folder.
"""

from dtype_engine.runtime.export.contents import Contents
from dtype_engine.runtime.export.export import export
from dtype_engine.runtime.export.plan import of_checkpoint, of_live

__all__ = ["Contents", "export", "of_checkpoint", "of_live"]
