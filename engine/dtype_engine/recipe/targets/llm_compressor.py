"""Converts recipes for llm-compressor: a recipe with one `QuantizationModifier`.

compressed-tensors matches targets against module names. A target is an exact name, a class name, or `re:` and an expression for
`re.match`. `re.match` only anchors the start, so the expressions written here end in `$`. Only module weights are quantized.
"""

from __future__ import annotations

from typing import Any

from dtype_engine.core import dtypes
from dtype_engine.recipe.schemes import DESCRIBED, activation_scheme, weight_scheme
from dtype_engine.recipe.targets.base import (
    Context,
    Conversion,
    Match,
    Target,
    as_comment,
    exact_first,
    loading_note,
    matcher,
    split,
    weights_in,
    weights_of,
)
from dtype_engine.recipe.targets.name_patterns import regexes

NAME = "llm-compressor"
KINDS = frozenset({"Linear"})
FORMATS = tuple(
    name
    for name in DESCRIBED
    if (blocks := dtypes.BY_NAME[name].blocks) is None or blocks.rule in ("amax", "compressed-tensors")
)
"""The formats in which llm-compressor quantizes to the same values as this program. MX formats have several scale rules here, of
which llm-compressor has one, so only the format with that rule is in the list.
"""


def convert(context: Context) -> Conversion:
    import yaml

    parts = split(context, NAME, FORMATS, KINDS)
    modules = [name for name in context.tree.modules if name]
    groups: dict[str, Any] = {}
    patterns: list[tuple[str, str]] = []
    for number, (dtype, names) in enumerate(parts.by_dtype().items()):
        targets = [f"re:{regex}$" for regex in regexes((name.rpartition(".")[0] for name in names), modules)]
        patterns += [(target, dtype) for target in targets]
        groups[f"group_{number}"] = {"targets": targets, "weights": weight_scheme(dtype)}
        if context.activations == "weights" and (inputs := activation_scheme(dtype)) is not None:
            groups[f"group_{number}"]["input_activations"] = inputs
    notes = [loading_note(parts.base)]
    modifiers: dict[str, Any] = {}
    if groups:
        modifiers["QuantizationModifier"] = {"ignore": [], "config_groups": groups}
    else:
        notes.append("there is nothing to quantize in this plan")
    recipe = {"quant_stage": {"quant_modifiers": modifiers}}
    text = as_comment(notes) + yaml.safe_dump(recipe, sort_keys=False, width=1 << 20)
    return Conversion(text, tuple(patterns), parts.base, parts.losses.result(), tuple(notes))


def match(context: Context, pattern: str) -> Match:
    weights = weights_of(context, KINDS)
    if pattern.startswith("re:"):
        matches = matcher(pattern[3:], pattern, "match")
        return Match(frozenset(tensor for module, tensor in weights.items() if matches(module)))
    # In llm-compressor, the counterpart of `type:Class` is the class name alone.
    name = pattern.removeprefix("type:")
    taken = frozenset(
        tensor
        for module, tensor in weights.items()
        if module == name or context.is_kind(context.tree.modules[module], (name,))
    )
    return Match(taken, None if taken else "without 're:' it is a module name or a class name, not a pattern")


TARGET = Target(
    NAME, "'re:' and re.match, exact module names, or class names", exact_first, convert, weights_in(KINDS), match
)
