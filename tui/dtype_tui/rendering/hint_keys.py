"""Replaces the engine's placeholders for hints with the app's keys. The command line replaces them with its options."""

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
    """Return a sentence of the engine with its placeholders for hints replaced by the app's keys."""
    return fill_hints(sentence, IN_THE_APP)
