"""Uses private names of transformers, and one of diffusers. No other file does. Tested with transformers 5.20 to 5.24.

If a version lacks a name, the function that uses it falls back as its docstring states, and a test in
`tests/engine/runtime/libraries/test_hf_private.py` fails with a message that states the missing name.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from dtype_engine.core.errors import UserError
from dtype_engine.core.replaced import replaced
from dtype_engine.core.text import printable

SKIPPED_BY_DIFFUSERS = "_skip_layerwise_casting_patterns"
"""The class attribute with regular expressions for the names of modules that diffusers' layerwise casting skips."""


def float32_patterns(module: nn.Module) -> list[tuple[str, str]]:
    """Return patterns of the modules and tensors that a module's class declares to keep in float32, as pairs (regular expression,
    name of the class attribute that declares it). An expression is searched for in names relative to `module`.

    The words in `_keep_in_fp32_modules` (which transformers applies to float16 only) and `_keep_in_fp32_modules_strict` match
    names of modules, parameters and buffers. In transformers, a word matches every name that contains it, and `*` in it stands for
    any characters. Elsewhere, as in diffusers, it matches every dotted name that has it as one of its parts.
    """
    anywhere = hasattr(module, "_get_dtype_plan")
    declared = [
        (str(word).replace("*", ".*") if anywhere else rf"(?:^|\.){re.escape(str(word))}(?:\.|$)", attribute)
        for attribute in ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")
        for word in getattr(module, attribute, None) or ()
    ]
    return declared + [
        (str(pattern), SKIPPED_BY_DIFFUSERS) for pattern in getattr(module, SKIPPED_BY_DIFFUSERS, None) or ()
    ]


def renamed_on_load(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return a mapping from tensor names in files of older diffusers versions to the names that the installed diffusers gives them.
    Names that do not change are left out. The result is empty if the module has no `_fix_state_dict_keys_on_load`.
    """
    fix = getattr(module, "_fix_state_dict_keys_on_load", None)
    if fix is None:
        return {}
    found = {name: name for name in names}
    fix(found)
    return {before: name for name, before in found.items() if name != before}


def install_output_hooks(module: nn.Module) -> None:
    """Install the hooks with which a transformers model collects its hidden states. Nothing is done if transformers lacks
    `maybe_install_capturing_hooks`.

    If the model's first call installed the hooks, it would also set an attribute that says so. A forward pass here restores the
    model's attributes afterwards. So the next pass would install the hooks again and collect every state twice.
    """
    from transformers import PreTrainedModel

    try:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ImportError:
        return
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            maybe_install_capturing_hooks(part)


def as_published(module: Any) -> None:
    """Let transformers expect the names that tensors have in published files, and not those of the quantized files from which it
    loaded the module: it then keeps other conversions in `_weight_conversions`. Without that attribute, it expects them anyway.
    """
    module._weight_conversions = None


def draft_logits(head: Any, states: torch.Tensor) -> torch.Tensor:
    """Return the logits of a `transformers.modeling_layers.MtpModel` for hidden states [..., width]: [..., classes]. It scales and
    cuts them as the model does. If `_project_to_logits` is missing, they are those of the output layer alone.
    """
    logits: torch.Tensor = getattr(head, "_project_to_logits", head.shared_head)(states)
    return logits


def with_dtypes(model_class: Any, dtypes: Mapping[str, torch.dtype]) -> Any:
    """Return a subclass of `model_class` whose `from_pretrained` loads each tensor in the dtype that `dtypes` has for its name.

    If `_get_dtype_plan` is missing, return `model_class` itself, which loads all tensors in one dtype.
    """
    if not isinstance(model_class, type) or not hasattr(model_class, "_get_dtype_plan"):
        return model_class

    class Stored(model_class):  # type: ignore[misc]
        def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
            names: dict[torch.dtype, list[str]] = {}
            for name, stored in dtypes.items():
                names.setdefault(stored, []).append(re.escape(name))
            return {f"^(?:{'|'.join(group)})$": stored for stored, group in names.items()}

    Stored.__name__, Stored.__qualname__ = model_class.__name__, model_class.__qualname__
    Stored.__module__ = model_class.__module__
    return Stored


@contextmanager
def without_questions() -> Iterator[None]:
    """During the `with` block, make transformers raise ValueError instead of asking on standard input whether a model's code may
    run. Nothing changes if transformers lacks `TIME_OUT_REMOTE_CODE`, the seconds for which it waits for an answer.
    """
    try:
        from transformers import dynamic_module_utils
    except ImportError:
        yield
        return
    has_seconds = hasattr(dynamic_module_utils, "TIME_OUT_REMOTE_CODE")
    with replaced(dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0) if has_seconds else nullcontext():
        yield


@contextmanager
def cache_updates_by(function: Callable[[Callable[..., Any], torch.Tensor, torch.Tensor], Any]) -> Iterator[None]:
    """During the `with` block, replace each call `Cache.update(keys, values, ...)` of a model by `function(update, keys, values)`.
    `update(keys, values)` writes keys and values into the cache, and returns the keys and values of all tokens.
    """
    library = sys.modules.get("transformers.cache_utils")
    if library is None:
        yield
        return
    original = library.Cache.update

    @functools.wraps(original)
    def update(cache: Any, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(lambda keys, values: original(cache, keys, values, *args, **kwargs), key_states, value_states)

    with replaced(library.Cache, "update", update):
        yield


@contextmanager
def attention_queries_by(function: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """During the `with` block, let a model's attention work with `function(queries)` instead of its queries [batch, heads, tokens,
    width]. Nothing changes for attention that does not look its kernel up by `AttentionInterface.get_interface` of transformers.
    """
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        yield
        return
    original = library.AttentionInterface.get_interface

    @functools.wraps(original)
    def get_interface(interface: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        attention = original(interface, *args, **kwargs)

        @functools.wraps(attention)
        def on_queries(module: nn.Module, query: torch.Tensor, *rest: Any, **named: Any) -> Any:
            return attention(module, function(query), *rest, **named)

        return on_queries

    with replaced(library.AttentionInterface, "get_interface", get_interface):
        yield


def converted_names(
    module: nn.Module, names: Iterable[str], live: Mapping[str, torch.Tensor]
) -> dict[str, tuple[str, bool, tuple[int | None, int] | None]]:
    """Return where transformers loads the tensors of a checkpoint that it renames or packs. If a transformers function is missing,
    the result is empty.

    names: the tensors' names in the files. live: the tensors of the module, keyed by name. The result maps a name in the files to
    (the name in `live`, whether this weight is packed from several tensors of the files, the position of this tensor in it), for
    example `experts.3.up_proj.weight` to (`experts.gate_up_proj`, True, (3, 1)). `Placement.place` describes the position.
    """
    try:
        renamed, converters = _renamed(module, names, live)
        found = {name: (new, pattern) for name, (new, pattern) in renamed.items() if new in live}
        places = _positions(found, converters)
        return {name: (new, pattern is not None, places.get(name)) for name, (new, pattern) in found.items()}
    except (ImportError, AttributeError, TypeError, ValueError):
        return {}


def turned_names(module: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the names in the files of the tensors that transformers transposes on loading. If a transformers function is missing,
    the result is empty.
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
    """Return (the new name of each tensor of the files, all converters that pack or transpose tensors for the model). The first is
    a dictionary from a name in the files to (the name after loading, the name pattern of the converter that processes the tensor
    or None). live: the tensors of the module, keyed by name.
    """
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
"""The operations, with their dimension, in the three ways in which transformers packs several tensors into one weight. `_STACKED`:
each tensor becomes one matrix of the weight. `_STACKED_BELOW`: each matrix of the weight consists of several tensors, one below the
other. `_BELOW`: the weight is one matrix of all tensors, one below the other.
"""


def _positions(
    found: Mapping[str, tuple[str, str | None]], converters: Iterable[Any]
) -> dict[str, tuple[int | None, int]]:
    """Return the position of each tensor of the files in the weight into which transformers packs it. found, converters: the
    results of `_renamed`.
    """
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
    """Return the name of the kernel, such as "sdpa", that a configuration selects for `of`, "attn" or "experts", or None."""
    return getattr(config, f"_{of}_implementation_internal", None)


def set_implementation(config: Any, of: str, name: str | None) -> None:
    """Select a kernel for `of` ("attn" or "experts") in a configuration, but not in nested ones. None selects the default."""
    setattr(config, f"_{of}_implementation_internal", name)


@contextmanager
def other_attention(module: nn.Module) -> Iterator[str | None]:
    """During the `with` block, make a transformers model use "eager" attention instead of "sdpa", or the reverse. Yields the name
    of the implementation in use. Yields None if the model can't be switched.
    """
    other = {"sdpa": "eager", "eager": "sdpa"}.get(attention_of(module) or "")
    with ExitStack() as stack:
        if other is not None:
            try:
                stack.enter_context(with_attention(module, other))
            except UserError:
                other = None
        yield other


@contextmanager
def with_attention(module: nn.Module, name: str) -> Iterator[None]:
    """During the `with` block, make a transformers model use the implementation of attention `name`, such as "eager". Raises
    UserError if the model can't be switched, or lacks `_can_set_attn_implementation`.
    """
    before = [(config, implementation(config, "attn")) for config in _configs(module)]
    if not getattr(module, "_can_set_attn_implementation", lambda: False)():
        raise UserError(f"transformers can't change the attention of {type(module).__name__} to {name}")
    try:
        try:
            module.set_attn_implementation(name)  # type: ignore[operator]
        except (ValueError, ImportError, AttributeError) as error:
            raise UserError(f"{type(module).__name__} has no attention {name}: {printable(str(error), 200)}") from None
        yield
    finally:
        # The configurations of a model's parts may have had different implementations.
        for config, own in before:
            set_implementation(config, "attn", own)


def attention_of(module: nn.Module) -> str | None:
    """Return the name of the implementation of attention that a transformers model uses, such as "sdpa", or None."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _configs(module: nn.Module) -> list[Any]:
    configs: dict[int, Any] = {}
    waiting = [config for part in module.modules() if (config := getattr(part, "config", None)) is not None]
    while waiting:
        config = waiting.pop()
        if id(config) not in configs and hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
            names = getattr(config, "sub_configs", {})
            waiting += [part for name in names if (part := getattr(config, name, None)) is not None]
    return list(configs.values())
