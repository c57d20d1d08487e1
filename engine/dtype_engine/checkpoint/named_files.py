"""Finds the files that the settings of a tokenizer, a processor or a scheduler name.

transformers passes every entry of such a file to the constructor of a class, and some constructors open a file if a value is a
string: `"vocab": "../notes.txt"` makes each line of that file a token of a `BertTokenizer`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

SETTINGS = (
    "tokenizer_config.json", "special_tokens_map.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "audio_tokenizer_config.json", "speaker_embeddings_path.json", "scheduler_config.json",
)  # fmt: skip
"""The names of files whose entries become arguments of constructors."""
_NEVER_OPENED = frozenset({"name_or_path", "_name_or_path", "special_tokens_map_file", "tokenizer_file"})
"""Entries that say where a tokenizer once came from. transformers ignores or replaces them."""
_NAMES_A_FILE = re.compile(r"(files?|paths?|dirs?|folders?|vocab|merges)$", re.IGNORECASE)
"""Matches keys whose value is a name even if it has no slash. A token may be called `Makefile`."""


def named_files(content: object, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (key, path) for each existing file, or folder under a key such as `repo_path`, that the content of a JSON file in
    `folder` names, relative to `folder` or to the current folder.
    """
    left: list[tuple[str, object]] = [("", content)]
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += [(str(name), each) for name, each in value.items() if name not in _NEVER_OPENED]
        elif isinstance(value, list):
            left += [(key, each) for each in value]
        elif isinstance(value, str) and ("/" in value or _NAMES_A_FILE.search(key)):
            for path in (folder / value, Path.cwd() / value):
                if os.path.isfile(path) or (_NAMES_A_FILE.search(key) and os.path.isdir(path)):
                    yield key, path
