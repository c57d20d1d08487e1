"""The matrix: for every form the ways that refuse it, and the words that the refusal has. Every other way must work, and is
checked. A form without a row, or a row for no form, fails.
"""

from __future__ import annotations

from .commands import LIVE
from .screens import SCREENS
from .ways import COMMANDS, NO_NAME, SCHEME_WAYS

WAYS = (*COMMANDS, *SCREENS)
"""The ways to use a form."""
OF_SCHEMES = tuple(SCHEME_WAYS)
"""The ways to use a scheme of quantized weights."""
_RUNNING = (
    *(
        way
        for way in COMMANDS
        if way.startswith(("drift", "scan", "flow", "sweep", "search", "tokens"))
        and way not in ("drift *.kv_cache", "drift *.ssm_state")
    ),
    *("app: Drift", "app: depth", "app: d", "app: g", "app: O"),
)
"""The ways that run the model. Formats of KV caches and of recurrent states are refused before that."""


def _no_pass(words: str) -> dict[str, str]:
    """Nothing can be run: the commands that run say why, and the rest works."""
    return dict.fromkeys(_RUNNING, words) | {"drift *.kv_cache": "names KV caches: no config.json tells"}


_READING = ("weights", "check", "export", "verify", "load back")
"""The beginnings of the names of ways that read values of tensors."""
_NO_CONFIG = _no_pass("no config.json")
_GGUF = _no_pass("GGUF")
_NO_PICTURES = {"drift --save-pictures": "makes no pictures"}
_NO_TEXT = _NO_PICTURES | {
    "app: g": "does not generate text",
    "drift --generate": "does not generate text",
    "tokens": "does not generate text",
    "drift *.kv_cache": "names KV caches",
    "scan kv:": "keeps no KV cache",
}
_IN_MEMORY = dict.fromkeys(("drift --over-memory", "app: O"), "can't be run in parts")
_CODE = dict.fromkeys(("check", "weights --against", "app: :check"), "is code") | _NO_TEXT | _IN_MEMORY

REFUSED_SCHEMES: dict[str, dict[str, str]] = {
    "ct int4 stacked": dict.fromkeys(
        ("drift", "drift of an execution", "drift --against", "drift --over-memory", "flow", "scan", "generate"),
        "does not know the architecture",
    )
    | {"drift *.kv_cache": "names KV caches"},
    "deepseek": {"drift *.kv_cache": "whose cache is not known here"},
}
"""The same for the schemes of quantized weights. A scheme without a row is refused nowhere."""

REFUSED: dict[str, dict[str, str]] = {
    "safetensors file": _NO_CONFIG,
    **dict.fromkeys(
        ("folder", "folder, bf16", "folder, sharded", "folder, mixed dtypes", "folder, tied"), _NO_PICTURES
    ),
    "folder, encoder": _NO_TEXT,
    "folder, BLIP": _NO_PICTURES,
    "folder, experts": _NO_PICTURES,
    "folder, draft head": _NO_PICTURES,
    "folder on a hub": dict.fromkeys(
        (*_RUNNING, *(way for way in COMMANDS if way.startswith(_READING)), "drift *.kv_cache", "app: v", "app: e"),
        "only the headers",
    ),
    "folder, .bin": _NO_PICTURES | _IN_MEMORY,
    "folder, .bin shards": _NO_PICTURES | _IN_MEMORY,
    **dict.fromkeys((".pth zip", ".pth deflated", ".pth legacy", ".pth nested", ".pth.tar", ".pth views"), _NO_CONFIG),
    "whole module": _NO_TEXT | _IN_MEMORY,
    **dict.fromkeys(("GGUF F16", "GGUF Q8_0", "GGUF Q4_K"), _GGUF),
    "diffusers": _no_pass("a pipeline has several models")
    | {"export .pth": "a folder for each component"}
    | _IN_MEMORY,
    "diffusers, runs": _IN_MEMORY
    | {
        "scan": "scan --exact",
        "search --metric": "scan --exact",
        "drift *.kv_cache": "names KV caches",
        "scan kv:": "keeps no KV cache",
        "drift --generate": "makes pictures and no text",
        "tokens": "makes pictures and no text",
        "drift --save": "the pictures that this model makes are not saved",
        "export .pth": "a folder for each component",
    },
    "adapter": _no_pass("an adapter alone is no model"),
    "adapter, with its base": _NO_PICTURES,
    **dict.fromkeys(("GPTQ", "AWQ", "bitsandbytes", "fp8 blocks", "compressed-tensors"), _NO_PICTURES),
    "own fp8 export": _NO_PICTURES | {"export .pth": "have scales"},
    **dict.fromkeys(("file.py:Class", "file.py:function", "file.py, compiled"), _CODE),
    "file.py --weights": _CODE | {"drift --against": "--weights goes with one model"},
    "file.py, no inputs": _no_pass("example_inputs()")
    | _CODE
    | dict.fromkeys(("scan kv:", "app: g", "tokens"), "example_inputs()"),
    "package.module:Name": _CODE,
    "live module": dict.fromkeys((way for way in WAYS if way not in LIVE), NO_NAME),
}
_NO_STATES = {"drift *.ssm_state": "matches nothing"}
REFUSED = {
    form: refused if form in ("folder, draft head", "live module") else refused | _NO_STATES
    for form, refused in REFUSED.items()
}
"""Of all forms, one has recurrent states; a live module has no name on a command line."""
