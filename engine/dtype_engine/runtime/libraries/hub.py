"""Keeps transformers from downloading anything that the user did not request.

A `config.json` may name repositories of the Hugging Face hub: a backbone, a native kernel for attention or experts, or Python code.
transformers downloads from these repositories when it builds or runs a model, and `local_files_only` does not prevent all of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dtype_engine.core.options import ModelOptions
from dtype_engine.core.replaced import replaced
from dtype_engine.core.text import printable
from dtype_engine.runtime.libraries.hf_private import implementation, set_implementation, without_questions

_OWN_ATTENTION = ("eager", "sdpa", "flex_attention")
_OWN_EXPERTS = ("eager", "grouped_mm", "batched_mm")
"""The implementations that are part of transformers and use only torch operations. Any other name refers to a package of native
code, which transformers downloads from the hub if it is not installed.
"""
_ELSEWHERE = ("fusion_config", "distributed_config", "kernel_config", "use_kernels")
"""Attributes of a configuration that make `from_pretrained` read files outside the checkpoint, or replace the model's code."""

_DEEPEST = 20


@contextmanager
def offline(options: ModelOptions | None = None) -> Iterator[None]:
    """During the `with` block, make two things raise an error: asking on standard input whether a model's code may run, as
    transformers does, and accessing the network through huggingface_hub. The network may be accessed if `options` allow both
    downloads and the model's own code, which may lie in another repository. huggingface_hub reads HF_HUB_OFFLINE only when it is
    imported, so the constant in its module is changed.
    """
    from huggingface_hub import constants

    allowed = options is not None and options.download and options.trust_remote_code
    with replaced(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE or not allowed), without_questions():
        yield


def without_foreign_kernels(config: Any, written: Mapping[str, Any], title: str) -> tuple[str, ...]:
    """Remove from a transformers configuration, and from its nested ones, all entries that would make transformers download code or
    read files outside the checkpoint. Returns notices about the removed entries.

    written: the content of `config.json`, from which the configuration was made. title: the name of the model.
    """
    taken: set[str] = set()
    for part in _parts(config):
        for of, own in (("attn", _OWN_ATTENTION), ("experts", _OWN_EXPERTS)):
            named = implementation(part, of)
            if named is not None and named not in own:
                set_implementation(part, of, None)
        taken |= {key for key in _ELSEWHERE if part.__dict__.pop(key, None) is not None}
    notices = [
        f"{title}: config.json asks for the {kind} kernel {printable(name, 100)}, which is native code from elsewhere: "
        "transformers' own is used, unless you pass --trust-remote-code"
        for kind, name in dict.fromkeys(_kernels(written))
    ]
    notices += [
        f"{title}: {key} in config.json is not followed, unless you pass --trust-remote-code" for key in sorted(taken)
    ]
    return tuple(notices)


def _kernels(written: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the kernels that a `config.json` or a nested configuration names and that are not part of transformers, as ("attention"
    or "experts", name of the kernel).
    """
    for key, value in written.items():
        kind = {"attn_implementation": "attention", "experts_implementation": "experts"}.get(key.removeprefix("_"))
        if kind is not None:
            own = _OWN_ATTENTION if kind == "attention" else _OWN_EXPERTS
            names = list(value.values()) if isinstance(value, Mapping) else [value]
            yield from ((kind, str(name)) for name in names if name is not None and name not in own)
        elif isinstance(value, Mapping) and depth < _DEEPEST:
            yield from _kernels(value, depth + 1)


def _parts(config: Any, seen: set[int] | None = None) -> Iterator[Any]:
    seen = set() if seen is None else seen
    if id(config) in seen or not hasattr(config, "to_diff_dict"):
        return
    seen.add(id(config))
    yield config
    for value in list(vars(config).values()):
        yield from _parts(value, seen)
