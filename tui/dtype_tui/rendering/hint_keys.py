"""The app's words for the hints in the engine's messages, such as `{hint:no-sound}`. They name keys; the words of the command line
name options.
"""

from __future__ import annotations

from collections.abc import Mapping

from dtype_engine.core.hints import HintName, fill_hints

IN_THE_APP: Mapping[HintName, str] = {
    "tensors": "give tensors from a .safetensors, .npz or .pt file with the key i",
    "no-picture": "leave the image out (key i)",
    "no-sound": "leave the audio out (key i)",
    "no-chat": "give plain text, without messages or the word chat (key i)",
    "replace": "",
    "no-autocast": "turn torch.autocast off first (key ,)",
    "download": ":download fetches the model",
    "over-memory": "O",
    "own-formats": "type formats own to allow what only this program loads",
    "formats": "type formats own to allow what only this program loads",
    "lost-values": "m looks for those that the casts lose",
}


def with_keys(sentence: str) -> str:
    """Return a message of the engine with each hint, such as `{hint:no-sound}`, replaced by words that name a key."""
    return fill_hints(sentence, IN_THE_APP)
