"""Converts recipes for llm-compressor: a recipe with a `QuantizationModifier`, and a `GPTQModifier` for weights with that rounding.

compressed-tensors matches targets against module names. A target is an exact name, a class name, or `re:` and an expression for
`re.match`. `re.match` only anchors the start, so the expressions written here end in `$`. Only module weights are quantized.

llm-compressor's observer `imatrix_mse` (`llmcompressor/observers/imatrix.py`) is the rounding `imatrix`: it chooses scales by the
error weighted with E[x²], among other candidates than this program. `GPTQModifier` (`llmcompressor/modifiers/gptq/base.py`) takes
its scales from the observer, too. With `actorder: static`, channels are rounded in the order of H's diagonal, in groups as stored.
"""

from __future__ import annotations

from collections.abc import Mapping
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


_GPTQ = {"actorder": "static", "dampening_frac": 0.01}
"""The options of `GPTQModifier` with which it rounds as `runtime/numerics/roundings.py` does, apart from scales."""
_OTHER_SCALES = "llm-compressor's observer imatrix_mse tries other scales"
_CALIBRATION_NOTES = (
    "imatrix_mse and GPTQModifier need calibration data: pass oneshot(..., dataset=...) the text of --calibration",
    "where IMatrixGatherer is a modifier of its own (llm-compressor 0.11), put one with these targets before the others",
)


class LlmCompressor(Quantizer):
    name = title = "llm-compressor"
    matcher = "'re:' and re.match, exact module names, or class names"
    precedence = "exact first"
    kinds = frozenset({"Linear"})
    formats = _FORMATS
    roundings = ("imatrix", "gptq")

    def write(self, context: Context) -> Conversion:
        import yaml

        parts = self.split(context)
        modules = [name for name in context.tree.modules if name]
        modifiers: dict[str, dict[str, Any]] = {}
        patterns: list[tuple[str, str]] = []
        notes = [parts.loading_note()]
        for number, ((dtype, rounding), names) in enumerate(_groups(context, parts.low).items()):
            targets = [f"re:{regex}$" for regex in regexes((name.rpartition(".")[0] for name in names), modules)]
            patterns += [(target, dtype) for target in targets]
            group: dict[str, Any] = {"targets": targets, "weights": weight_scheme(dtype) | _observer(rounding)}
            if context.activations == "weights" and (inputs := activation_scheme(dtype)) is not None:
                group["input_activations"] = inputs
            kind, options = ("GPTQModifier", _GPTQ) if rounding == "gptq" else ("QuantizationModifier", {})
            modifier = modifiers.setdefault(kind, {"ignore": [], **options, "config_groups": {}})
            modifier["config_groups"][f"group_{number}"] = group
            if rounding:
                for name in names:
                    parts.losses.add(name, dtype, dtype, _OTHER_SCALES, "scale")
        if not modifiers:
            notes.append("there is nothing to quantize in this plan")
        if context.roundings.keys() & parts.low.keys():
            notes += _CALIBRATION_NOTES
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


def _groups(context: Context, low: Mapping[str, str]) -> dict[tuple[str, str], list[str]]:
    """Return the names of the weights to quantize by (dtype, rounding or ""), in the model's order. low: their dtypes by name."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, dtype in low.items():
        groups.setdefault((dtype, context.roundings.get(name, "")), []).append(name)
    return groups


def _observer(rounding: str) -> dict[str, Any]:
    """Return the entries of a scheme for weights whose scales a rounding chooses, none for "": the squared error counts."""
    return {"observer": "imatrix_mse", "observer_kwargs": {"norm": 2.0}} if rounding else {}


TARGET = LlmCompressor()
