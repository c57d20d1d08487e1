"""Fills the placeholders for hints in the engine's sentences with keys of the app. The command line fills them with options."""

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
}


def with_keys(sentence: str) -> str:
    """Return a sentence of the engine with the app's keys in its hints."""
    return fill_hints(sentence, IN_THE_APP)
