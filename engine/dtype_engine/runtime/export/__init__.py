"""Exports: a checkpoint in the dtypes of a recipe, written shard by shard.

An exported folder is a checkpoint like any other, in the names of its source: `config.json`, the weights in safetensors,
tokenizer and processor files, and `recipe.yaml` and `README.md`, which say what was done and how to load it.
"""

from dtype_engine.runtime.export.contents import Contents
from dtype_engine.runtime.export.export import export
from dtype_engine.runtime.export.plan import of_checkpoint, of_live

__all__ = ["Contents", "export", "of_checkpoint", "of_live"]
