"""Checks that a model's embedding has a row for each token of the tokenizer next to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dtype_engine.checkpoint.checkpoint import Checkpoint
from dtype_engine.checkpoint.weight_files import read_json, resolve_inside
from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.results.check import Finding

_FILE = "tokenizer.json"


def tokenizer_findings(checkpoint: Checkpoint, endings: tuple[str, ...]) -> Iterator[Finding]:
    """Yield a finding if the embedding has no row for the largest id of the tokenizer. endings: the possible ends of the
    embedding's name. Raises UserError if `tokenizer.json` can't be read.
    """
    folder = checkpoint.path
    if checkpoint.form not in ("safetensors", "pickle") or not folder.is_dir() or not (folder / _FILE).is_file():
        return
    rows = {
        name: tensor.shape[0]
        for name, tensor in checkpoint.weights.items()
        if name.endswith(endings) and len(tensor.shape) == 2
        if name in checkpoint.coded or tensor.dtype in dtypes.COMPUTE_DTYPES
    }
    if not rows:
        return
    embedding = max(rows, key=lambda name: rows[name])
    largest = _largest_id(read_json(resolve_inside(folder, _FILE)))
    if largest >= rows[embedding]:
        what = f"has ids up to {largest:,}, and {printable(embedding)} has {rows[embedding]:,} rows"
        yield Finding("tokenizer", _FILE, what, _FILE)


def _largest_id(tokenizer: Mapping[str, Any]) -> int:
    """Return the largest id in the content of a `tokenizer.json`, or -1 if it has none."""
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
    return max(ids, default=-1)
