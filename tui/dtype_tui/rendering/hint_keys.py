"""The hints of the engine's sentences in the app's words: a key does what an option does on the command line."""

from __future__ import annotations

from collections.abc import Mapping

from dtype_engine.core.hints import HintName, fill_hints

IN_THE_APP: Mapping[HintName, str] = {
    "tensors": "give tensors from a .safetensors, .npz or .pt file with the key i",
    "no-picture": "leave the picture out (key i)",
    "no-sound": "leave the sound out (key i)",
    "no-chat": "give plain text, without messages or the word chat (key i)",
    "replace": "",
    "no-autocast": "turn torch.autocast off first (key ,)",
}


def with_keys(sentence: str) -> str:
    """A sentence of the engine with its hints as keys."""
    return fill_hints(sentence, IN_THE_APP)
