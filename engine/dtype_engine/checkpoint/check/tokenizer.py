"""Checks that a model's embedding has a row for each token of config.json and of the tokenizer next to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dtype_engine.checkpoint.checkpoint import Checkpoint
from dtype_engine.checkpoint.schemes.configuration import mapping
from dtype_engine.checkpoint.weight_files import read_json, resolve_inside
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.results.check import Finding

_FILE = "tokenizer.json"
_WITHOUT_IT = ("vocab.json", "added_tokens.json")
"""The files from which slow tokenizers are made. Beside `_FILE` they are not read."""

_BESIDE = ("generation_config.json", "preprocessor_config.json", "processor_config.json", "special_tokens_map.json")
"""Further files that loaders of a model read."""


def tokenizer_findings(checkpoint: Checkpoint, endings: tuple[str, ...]) -> Iterator[Finding]:
    """Yield a finding for each file of the tokenizer that can't be read, and for each with an id for which the embedding has no
    row. Yields one more if config.json declares more tokens than there are rows. endings: the ends of embeddings' names. Raises
    UserError.
    """
    folder = checkpoint.path
    if checkpoint.form not in ("safetensors", "pickle") or not folder.is_dir():
        return
    rows = {
        name: tensor.shape[0]
        for name, tensor in checkpoint.weights.items()
        if name.endswith(endings) and len(tensor.shape) == 2
        if name in checkpoint.coded or tensor.dtype in dtypes.COMPUTE_DTYPES
    }
    embedding = max(rows, key=lambda name: rows[name], default="")
    of_tokenizer = ((_FILE,) if (folder / _FILE).is_file() else _WITHOUT_IT) + ("tokenizer_config.json",)
    for file in (*of_tokenizer, *_BESIDE):
        if not (folder / file).is_file():
            continue
        path = resolve_inside(folder, file)
        try:
            content = read_json(path)
        except UserError:
            yield Finding("configuration", file, "is no valid JSON object", file)
            continue
        largest = _largest_id({"model": {"vocab": content}} if file in _WITHOUT_IT else content)
        if rows and file in of_tokenizer and largest >= rows[embedding]:
            what = f"has ids up to {largest:,}, and {printable(embedding)} has {rows[embedding]:,} rows"
            yield Finding("tokenizer", file, what, file)
    config = checkpoint.config or {}
    declared = (mapping(config.get("text_config")) or config).get("vocab_size")
    if rows and type(declared) is int and declared > rows[embedding]:
        what = f"is {declared:,}, and {printable(embedding)} has {rows[embedding]:,} rows"
        yield Finding("declared-size", "vocab_size", what, "config.json")


def _largest_id(tokenizer: Mapping[str, Any]) -> int:
    """Return the largest id in the content of a tokenizer's file, or -1 if it has none."""
    model = tokenizer.get("model")
    words = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(words, dict):
        ids = [number for number in words.values() if type(number) is int]
    else:  # Unigram has a list of (token, score), whose positions are the ids
        ids = [len(words) - 1] if isinstance(words, list) else []
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and type(number := token.get("id")) is int:
            ids.append(number)
    ids += [int(key) for key in mapping(tokenizer.get("added_tokens_decoder")) if key.isdecimal() and len(key) < 10]
    return max(ids, default=-1)
