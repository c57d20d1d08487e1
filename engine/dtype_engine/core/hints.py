"""Hints in messages: what the user can do, by an option on the command line and by a key in the app.

A message contains a placeholder, as in "m takes no sounds; {hint:no-sound}", which `fill_hints` replaces when it is shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

HintName = Literal[
    "tensors",
    "no-picture",
    "no-sound",
    "no-chat",
    "replace",
    "no-autocast",
    "download",
    "over-memory",
    "formats",
    "own-formats",
    "lost-values",
]
ON_THE_COMMAND_LINE: Mapping[HintName, str] = {
    "tensors": "give tensors with --inputs FILE (.safetensors, .npz or .pt)",
    "no-picture": "leave --image out",
    "no-sound": "leave --audio out",
    "no-chat": "give plain text, without messages or --chat",
    "replace": ", or replace it with --force",
    "no-autocast": "turn torch.autocast off first",
    "download": "--download fetches the model",
    "over-memory": "--over-memory",
    "own-formats": "--formats own allows what only this program loads",
    "formats": "scan more dtypes, such as --dtypes bf16,int4@g128, or allow those that only this program loads with --formats own",
    "lost-values": "dtype-engine weights looks for those that the casts lose",
}
_PLACE = re.compile(r"\{hint:([a-z-]+)\}")


def hint(name: HintName) -> str:
    """Return the placeholder for a hint."""
    return f"{{hint:{name}}}"


def fill_hints(sentence: str, words: Mapping[HintName, str]) -> str:
    """Return a message with its placeholders replaced by `words`. Other text in braces, such as in a file name, stays."""
    by_name = {str(name): text for name, text in words.items()}
    return _PLACE.sub(lambda found: by_name.get(found[1], found[0]), sentence)
