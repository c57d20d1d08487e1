"""Tokenizers that make the tokenizers library panic when they encode a text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.helpers.paths import DEMO

_FIRST = {"Sequence": {"id": "A", "type_id": 0}}
PANICS: dict[str, dict[str, Any]] = {
    "a post-processor that names a missing special token": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[GONE]", "type_id": 0}}, _FIRST],
            "pair": [_FIRST, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {},
        }
    },
    "a damaged precompiled normaliser": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}},
    "a bad prepend": {"normalizer": {"type": "Prepend", "prepend": ""}},
}
"""The entries of `tokenizer.json` that are changed, by what is wrong with them."""


def with_panicking_tokenizer(kind: str, folder: Path) -> Path:
    """Copy the demo to `folder`, with such a tokenizer."""
    shutil.copytree(DEMO, folder)
    settings = json.loads((DEMO / "tokenizer.json").read_text()) | PANICS[kind]
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    return folder
