"""Fills the hints in the engine's sentences with keys of the app, where the command line would name options."""

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
    """A sentence of the engine whose hints name keys."""
    return fill_hints(sentence, IN_THE_APP)
