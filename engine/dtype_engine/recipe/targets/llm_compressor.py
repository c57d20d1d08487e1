"""Converts recipes for llm-compressor: a recipe with one `QuantizationModifier`.

compressed-tensors matches targets against module names. A target is an exact name, a class name, or `re:` and an expression for
`re.match`. `re.match` only anchors the start, so the expressions written here end in `$`. Only module weights are quantized.
"""

from __future__ import annotations

from typing import Any

from dtype_engine.core import dtypes
from dtype_engine.recipe.schemes import DESCRIBED, activation_scheme, weight_scheme
from dtype_engine.recipe.targets.base import Context, Conversion, Match, Quantizer, as_comment, tool_regex
from dtype_engine.recipe.targets.name_patterns import regexes

_FORMATS = tuple(
    name
    for name in DESCRIBED
    if (blocks := dtypes.BY_NAME[name].blocks) is None or blocks.rule in ("amax", "compressed-tensors")
)
"""The formats that llm-compressor quantizes to the same values as this program, which include one of the rules for MX scales."""


class LlmCompressor(Quantizer):
    name = title = "llm-compressor"
    matcher = "'re:' and re.match, exact module names, or class names"
    precedence = "exact first"
    kinds = frozenset({"Linear"})
    formats = _FORMATS

    def write(self, context: Context) -> Conversion:
        import yaml

        parts = self.split(context)
        modules = [name for name in context.tree.modules if name]
        groups: dict[str, Any] = {}
        patterns: list[tuple[str, str]] = []
        for number, (dtype, names) in enumerate(parts.by_dtype().items()):
            targets = [f"re:{regex}$" for regex in regexes((name.rpartition(".")[0] for name in names), modules)]
            patterns += [(target, dtype) for target in targets]
            groups[f"group_{number}"] = {"targets": targets, "weights": weight_scheme(dtype)}
            if context.activations == "weights" and (inputs := activation_scheme(dtype)) is not None:
                groups[f"group_{number}"]["input_activations"] = inputs
        notes = [parts.loading_note()]
        modifiers: dict[str, Any] = {}
        if groups:
            modifiers["QuantizationModifier"] = {"ignore": [], "config_groups": groups}
        else:
            notes.append("there is nothing to quantize in this plan")
        recipe = {"quant_stage": {"quant_modifiers": modifiers}}
        text = as_comment(notes) + yaml.safe_dump(recipe, sort_keys=False, width=1 << 20)
        return Conversion(text, tuple(patterns), parts.base, parts.losses.result(), tuple(notes))

    def match(self, context: Context, pattern: str) -> Match:
        weights = self.weights(context)
        if pattern.startswith("re:"):
            matches = tool_regex(pattern[3:], pattern, "match")
            return Match(frozenset(tensor for module, tensor in weights.items() if matches(module)))
        # In llm-compressor, the counterpart of `type:Class` is the class name alone.
        name = pattern.removeprefix("type:")
        taken = frozenset(
            tensor
            for module, tensor in weights.items()
            if module == name or context.is_kind(context.tree.modules[module], (name,))
        )
        return Match(taken, None if taken else "without 're:' it is a module name or a class name, not a pattern")


TARGET = LlmCompressor()
