"""Converts recipes for vLLM, which quantizes a checkpoint while it loads it: the text is the value of `--quantization-config`.

The text has `targets`, which map patterns to schemes: a pattern is `re:` and an expression for `re.match`, a glob, or an exact
name. Layers that no pattern matches stay wide (`OnlineQuantizationConfig` in `layers/quantization/online/base.py`). vLLM compares
the names that layers have in the checkpoint. Those of fused layers are compared one by one, also if the model lacks one of them,
and experts are compared as one layer, whose name ends in `experts`.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections.abc import Callable

from dtype_engine.core.fused import fused_name
from dtype_engine.recipe import online_schemes
from dtype_engine.recipe.online_schemes import OnlineScheme, formats_of
from dtype_engine.recipe.targets.base import Context, Match, tool_regex
from dtype_engine.recipe.targets.name_patterns import regexes
from dtype_engine.recipe.targets.online import (
    Online,
    Quantized,
    checkpoint_names,
    count_of_layers,
    is_quantized,
    layers,
)

_MADE_AS = "0.33"
"""The vLLM release whose options are written."""


class VLLM(Online):
    name, title = "vllm", "vLLM"
    matcher = "'re:' and re.match, globs or exact names, on the layers of the checkpoint"
    schemes = online_schemes.VLLM
    formats = formats_of(schemes)

    def told(self, context: Context, found: Quantized) -> tuple[str, tuple[tuple[str, str], ...], tuple[str, ...]]:
        by_weight = layers(context)
        universe = {name for layer in by_weight.values() for name in layer.names}
        by_scheme: dict[OnlineScheme, dict[str, None]] = {}
        for weight, scheme in found.schemes.items():
            by_scheme.setdefault(scheme, {}).update(dict.fromkeys(by_weight[weight].names))
        patterns = tuple(
            (f"re:{regex}$", scheme.name) for scheme, names in by_scheme.items() for regex in regexes(names, universe)
        )
        text = {"targets": dict(patterns)}
        command = ["vllm", "serve", "MODEL", "--dtype", found.base]
        notes: tuple[str, ...] = ()
        if patterns:
            # Beside the scheme of a quantized checkpoint, only the option itself adds layers that are quantized online.
            command += [] if is_quantized(context) else ["--quantization", "online"]
            command += ["--quantization-config", json.dumps(text)]
            count = count_of_layers(context, found.schemes)
            form = f"this is the form that vLLM {_MADE_AS} reads, with the names of the checkpoint"
            notes = (f"{form}: it logs how many layers it quantizes, {count:,} if it knows them by these",)
        return json.dumps(text, indent=2) + "\n", patterns, (shlex.join((*command, *found.flags)), *notes)

    def match(self, context: Context, pattern: str) -> Match:
        is_regex = pattern.startswith("re:")
        glob = re.compile(fnmatch.translate(pattern)).match
        matches: Callable[[str], object] = tool_regex(pattern[3:], pattern, "match") if is_regex else glob
        taken: set[str] = set()
        for layer in dict.fromkeys(layers(context).values()):
            if layer.experts:
                taken.update(layer.weights if any(map(matches, layer.names)) else ())
            elif (fused := fused_name(layer.weights) if len(layer.weights) > 1 else "") and matches(fused):
                taken.update(layer.weights)
            else:
                tensors = context.tree.tensors
                taken.update(name for name in layer.weights if any(map(matches, checkpoint_names(tensors[name]))))
        why = "a pattern is compared with the names of layers, not of weights"
        return Match(frozenset(taken), None if taken else why)


TARGET = VLLM()
