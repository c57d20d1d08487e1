"""What of transformers (and one name of diffusers) is used although it is not public; checked with transformers 5.18 to 5.23.

Where a version has such a name no more, each function does without, as it says, and `tests/engine/runtime/model/test_hf_private.py`
fails with a sentence that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def float32_patterns(module: nn.Module) -> list[tuple[str, str]]:
    """(regular expression, attribute) of what a module's class wants kept in float32, to be searched for in the names below it.

    transformers: a word listed in `_keep_in_fp32_modules` (float16 only) or `_keep_in_fp32_modules_strict` means every module
    with that word in its dotted name; diffusers: `_skip_layerwise_casting_patterns`. Without these names: none.
    """
    declared = [
        (rf"(?:^|\.){re.escape(str(word))}(?:\.|$)", attribute)
        for attribute in ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")
        for word in getattr(module, attribute, None) or ()
    ]
    skipped = "_skip_layerwise_casting_patterns"
    return declared + [(str(pattern), skipped) for pattern in getattr(module, skipped, None) or ()]


def with_dtypes(model_class: Any, dtypes_of: Callable[[nn.Module], Mapping[str, torch.dtype]]) -> Any:
    """A class like `model_class` whose `from_pretrained` loads every tensor in the dtype that `dtypes_of` the module says, by name.

    Without `_get_dtype_plan`: the class itself, which loads all in one dtype.
    """
    if not isinstance(model_class, type) or not hasattr(model_class, "_get_dtype_plan"):
        return model_class

    def plan(self: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
        names: dict[torch.dtype, list[str]] = {}
        for name, stored in dtypes_of(self).items():
            names.setdefault(stored, []).append(re.escape(name))
        return {f"^(?:{'|'.join(group)})$": stored for stored, group in names.items()}

    same = {"_get_dtype_plan": plan, "__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), same)


def converted_names(
    module: nn.Module, names: Iterable[str], live: Mapping[str, torch.Tensor]
) -> dict[str, tuple[str, bool]]:
    """The names in `live` of tensors that transformers renames or packs as it loads, and whether each is only a part there.

    Without its functions for that: none.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        mapping = get_model_conversion_mapping(module)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        converted = {}
        for name in names:
            new, converter = rename_source_key(name, renamings, converters, module.base_model_prefix, live)
            if new in live:
                converted[name] = new, converter is not None
        return converted
    except (ImportError, AttributeError, TypeError, ValueError):
        return {}


def implementation(config: Any, of: str) -> str | None:
    """The kernel that a configuration itself names for attention ("attn") or "experts"; None where it names none."""
    named: str | None = getattr(config, f"_{of}_implementation_internal", None)
    return named


def set_implementation(config: Any, of: str, name: str | None) -> None:
    """Name the kernel for attention ("attn") or "experts" in one configuration, and not in those inside it."""
    setattr(config, f"_{of}_implementation_internal", name)


@contextmanager
def other_attention(module: nn.Module) -> Iterator[str | None]:
    """Another attention implementation of a transformers model for a while: its name, or None where there is none.

    None, too, without `_can_set_attn_implementation`.
    """
    before = [(config, implementation(config, "attn")) for config in _configs(module)]
    now = getattr(getattr(module, "config", None), "_attn_implementation", None)
    other = {"sdpa": "eager", "eager": "sdpa"}.get(now or "")
    can_set = getattr(module, "_can_set_attn_implementation", lambda: False)
    if other is None or not can_set():
        yield None
        return
    try:
        try:
            module.set_attn_implementation(other)  # type: ignore[operator]
        except (ValueError, ImportError, AttributeError):
            other = None
        yield other
    finally:
        # Each by itself: a model's parts need not all have had the same.
        for config, name in before:
            set_implementation(config, "attn", name)


def _configs(module: nn.Module) -> list[Any]:
    """Every configuration in a transformers model, those of its parts included."""
    configs: dict[int, Any] = {}
    waiting = [config for part in module.modules() if (config := getattr(part, "config", None)) is not None]
    while waiting:
        config = waiting.pop()
        if id(config) not in configs and hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
            names = getattr(config, "sub_configs", {})
            waiting += [part for name in names if (part := getattr(config, name, None)) is not None]
    return list(configs.values())
