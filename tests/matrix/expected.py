"""The matrix: for every form the ways that refuse it, and the words that the refusal has. Every other way must work, and is
checked. A form without a row, or a row for no form, fails.
"""

from __future__ import annotations

from .commands import COMMANDS, LIVE, NO_NAME, SCHEME_WAYS
from .screens import SCREENS

WAYS = (*COMMANDS, *SCREENS)
"""The ways to use a form."""
OF_SCHEMES = tuple(SCHEME_WAYS)
"""The ways to use a scheme of quantized weights."""
_RUNNING = (
    "drift",
    "drift --metric",
    "sweep --metric",
    "search --metric",
    "drift --against",
    "flow",
    "scan",
    "app: Drift",
    "app: depth",
    "app: d",
    "app: g",
)


def _no_pass(words: str) -> dict[str, str]:
    """Nothing can be run: the commands that run say why, and the rest works."""
    return dict.fromkeys(_RUNNING, words)


_NO_CONFIG = _no_pass("no config.json")
_GGUF = _no_pass("GGUF")
_NO_TEXT = {"app: g": "does not generate text"}
_CODE = dict.fromkeys(("check", "weights --against", "app: :check"), "is code") | _NO_TEXT

REFUSED_SCHEMES: dict[str, dict[str, str]] = {
    "ct int4 stacked": dict.fromkeys(
        ("drift", "drift --against", "flow", "scan", "generate"), "does not know the architecture"
    ),
}
"""The same for the schemes of quantized weights. A scheme without a row is refused nowhere."""

REFUSED: dict[str, dict[str, str]] = {
    "safetensors file": _NO_CONFIG,
    "folder": {},
    "folder, bf16": {},
    "folder, sharded": {},
    "folder, mixed dtypes": {},
    "folder, tied": {},
    "folder, encoder": _NO_TEXT,
    "folder, BLIP": {},
    "folder, experts": {},
    "folder on a hub": dict.fromkeys(
        (
            "weights",
            "weights --against",
            "check",
            "app: v",
            "app: e",
            "export",
            "export .pth",
            "verify",
            "verify theirs",
            "load back",
            *_RUNNING,
        ),
        "only the headers",
    ),
    "folder, .bin": {},
    "folder, .bin shards": {},
    ".pth zip": _NO_CONFIG,
    ".pth deflated": _NO_CONFIG,
    ".pth legacy": _NO_CONFIG,
    ".pth nested": _NO_CONFIG,
    ".pth.tar": _NO_CONFIG,
    ".pth views": _NO_CONFIG,
    "whole module": _NO_TEXT,
    "GGUF F16": _GGUF,
    "GGUF Q8_0": _GGUF,
    "GGUF Q4_K": _GGUF,
    "diffusers": _no_pass("a pipeline has several models") | {"export .pth": "a folder for each component"},
    "adapter": _no_pass("an adapter alone is no model"),
    "GPTQ": {},
    "AWQ": {},
    "bitsandbytes": {},
    "fp8 blocks": {},
    "compressed-tensors": {},
    "own fp8 export": {"export .pth": "have scales"},
    "file.py:Class": _CODE,
    "file.py:function": _CODE,
    "file.py, compiled": _CODE,
    "file.py --weights": _CODE | {"drift --against": "--weights goes with one model"},
    "file.py, no inputs": _CODE | _no_pass("example_inputs()"),
    "package.module:Name": _CODE,
    "live module": dict.fromkeys((way for way in WAYS if way not in LIVE), NO_NAME),
}
