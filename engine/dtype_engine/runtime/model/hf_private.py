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


@contextmanager
def without_questions() -> Iterator[None]:
    """While the block runs, transformers raises ValueError where it would ask on standard input whether a model's code may run.

    Without `TIME_OUT_REMOTE_CODE`, the seconds that it waits for an answer: no change.
    """
    try:
        from transformers import dynamic_module_utils
    except ImportError:
        yield
        return
    seconds = getattr(dynamic_module_utils, "TIME_OUT_REMOTE_CODE", None)
    if seconds is None:
        yield
        return
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = seconds


def converted_names(
    module: nn.Module, names: Iterable[str], live: Mapping[str, torch.Tensor]
) -> dict[str, tuple[str, bool, tuple[int | None, int] | None]]:
    """The names in `live` of tensors that transformers renames or packs as it loads, whether each is only a part there, and where
    in it: the index of its matrix along the first dimension (None where all is one matrix), and its place among the parts that lie
    below each other in that matrix. None instead of the two where parts are put together in any other way.

    Without its functions for that: none.
    """
    try:
        renamed, converters = _renamed(module, names, live)
        found = {name: (new, pattern) for name, (new, pattern) in renamed.items() if new in live}
        places = _places(found, converters)
        return {name: (new, pattern is not None, places.get(name)) for name, (new, pattern) in found.items()}
    except (ImportError, AttributeError, TypeError, ValueError):
        return {}


def loading_names(module: nn.Module, names: Iterable[str]) -> set[str]:
    """What transformers calls these tensors of the files while it loads them, as in its account of what it did not use.

    Without its functions for that: the same names.
    """
    try:
        return {new for new, _ in _renamed(module, names, module.state_dict())[0].values()}
    except (ImportError, AttributeError, TypeError, ValueError):
        return set(names)


def turned_names(module: nn.Module, names: Iterable[str]) -> set[str]:
    """Those of these tensors of the files that transformers turns as it loads them: two of their dimensions are exchanged.

    Without its functions for that: none.
    """
    try:
        renamed, converters = _renamed(module, names, module.state_dict())
    except (ImportError, AttributeError, TypeError, ValueError):
        return set()
    turning = {
        pattern
        for converter in converters
        if any(type(step).__name__ == "Transpose" for step in converter.operations)
        for pattern in converter.source_patterns
    }
    return {name for name, (_, pattern) in renamed.items() if pattern in turning}


def _renamed(
    module: nn.Module, names: Iterable[str], live: Mapping[str, torch.Tensor]
) -> tuple[dict[str, tuple[str, str | None]], list[Any]]:
    """The name that each gets as it is loaded, and the pattern of the converter that takes it; and all the converters."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(module)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix = module.base_model_prefix
    return {name: rename_source_key(name, renamings, converters, prefix, live) for name in names}, converters


_STACKED = (("MergeModulelist", 0),)
_STACKED_BELOW = (("MergeModulelist", 0), ("Concatenate", 1))
_BELOW = (("Concatenate", 0),)
"""What transformers does to parts: matrices behind each other, such of matrices below each other, matrices below each other."""


def _places(
    found: Mapping[str, tuple[str, str | None]], converters: Iterable[Any]
) -> dict[str, tuple[int | None, int]]:
    """Where each part lies, as `converted_names` has it. found: the live name of each, and the pattern that took it."""
    kinds: dict[str, set[tuple[tuple[tuple[str, int | None], ...], tuple[str, ...]]]] = {}
    for converter in converters:
        done = tuple((type(step).__name__, getattr(step, "dim", None)) for step in converter.operations)
        for pattern in converter.source_patterns:
            kinds.setdefault(pattern, set()).add((done, tuple(converter.source_patterns)))
    of_pattern: dict[tuple[str, str], list[str]] = {}
    for name, (new, pattern) in found.items():
        if pattern is not None:
            of_pattern.setdefault((new, pattern), []).append(name)
    places: dict[str, tuple[int | None, int]] = {}
    for (new, pattern), parts in of_pattern.items():
        if len(kinds.get(pattern, ())) != 1:
            continue
        ((done, patterns),) = kinds[pattern]
        parts.sort(key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
        if done == _STACKED_BELOW or (done == _STACKED and len(patterns) == 1):
            places |= {name: (index, patterns.index(pattern)) for index, name in enumerate(parts)}
        elif done == _BELOW:
            before = sum(len(of_pattern.get((new, other), ())) for other in patterns[: patterns.index(pattern)])
            places |= {name: (None, before + index) for index, name in enumerate(parts)}
    return places


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
