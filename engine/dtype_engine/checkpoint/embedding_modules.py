"""Reads how sentence-transformers makes one vector of a text with a checkpoint: `modules.json`, and the files that it names.

`modules.json` lists modules in the order in which they run, each with a `type` and the `path` of its folder. The folder of a
`Pooling` has a `config.json` with a flag for each way of pooling (sentence_transformers/models/Pooling.py).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from dtype_engine.checkpoint.weight_files import read_beside, read_json, refuse_link_out
from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import reading
from dtype_engine.core.text import printable

MODULES = "modules.json"
_TOKENIZING = "sentence_bert_config.json"
_PROMPTS = "config_sentence_transformers.json"
_LARGEST = 1 << 20
_FLAG = "pooling_mode_"
_SAME_COSINE = ("Transformer", "Normalize")
"""The modules that change no cosine between vectors: the model itself, and the division of a vector by its norm."""


class EmbeddingModules(msgspec.Struct, frozen=True):
    """What a checkpoint's `modules.json` says."""

    bare: bool
    """Whether the first module is a transformers model without a head, as `AutoModel` opens it."""
    poolings: tuple[str, ...]
    """The ways of pooling whose vectors are concatenated, such as `mean_tokens`. Empty if there is no pooling."""
    file: str
    """The file that says so, such as `1_Pooling/config.json`, relative to the folder."""
    dense: tuple[str, ...]
    """The folders of the linear layers that follow the pooling, in their order."""
    others: tuple[str, ...]
    """The types of further modules, which change cosines, such as `WordWeights`."""


def embedding_modules(folder: Path) -> EmbeddingModules | None:
    """Return what the `modules.json` of a folder says, or None if there is none. Raises UserError for an invalid file."""
    path = folder / MODULES
    if not path.is_file():
        return None
    try:
        with reading(path):
            listed = json.loads(read_beside(path, _LARGEST).decode())
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not valid JSON") from None
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise UserError(f"{path} is not a list of modules")
    types = [str(each.get("type", "")).rpartition(".")[2] for each in listed]
    paths = [str(each.get("path", "")) for each in listed]
    poolings, file, dense = tuple[str, ...](), MODULES, tuple[str, ...]()
    if "Pooling" in types:
        at = types.index("Pooling")
        poolings, file = _poolings(folder, paths[at]), f"{paths[at]}/config.json"
        after = zip(types[at:], paths[at:], strict=True)
        dense = tuple(_inner(folder, path) for kind, path in after if kind == "Dense")
    known = (*_SAME_COSINE, "Pooling", *(["Dense"] if types.count("Dense") == len(dense) else []))
    others = tuple(printable(each, 40) for each in types if each not in known)
    return EmbeddingModules(types[:1] == ["Transformer"], poolings, file, dense, others)


def _inner(folder: Path, name: str) -> str:
    """Return the name of a folder in the folder. Raises UserError if it is no such name, or a link out of the folder."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(f"{folder / MODULES}: {printable(name)!r} is not the name of a folder in this folder")
    refuse_link_out(folder, name)
    return name


def _poolings(folder: Path, inner: str) -> tuple[str, ...]:
    """Return the ways of pooling in the folder `inner`, without the prefix that all have: `mean_tokens`, `cls_token`."""
    config = read_json(folder / _inner(folder, inner) / "config.json")
    return tuple(key.removeprefix(_FLAG) for key, value in config.items() if key.startswith(_FLAG) and value is True)


def prompts(folder: Path) -> dict[str, str]:
    """Return the texts that sentence-transformers puts before inputs, by name, such as `query`. Raises UserError for an invalid
    file.
    """
    path = folder / _PROMPTS
    found: Any = read_json(path).get("prompts") if path.is_file() else None
    return {key: value for key, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}


def longest_text(folder: Path) -> int | None:
    """Return the number of tokens to which sentence-transformers cuts texts, or None if the folder does not say it.

    Raises UserError for an invalid file.
    """
    path = folder / _TOKENIZING
    found: Any = read_json(path).get("max_seq_length") if path.is_file() else None
    return found if type(found) is int and found > 0 else None
