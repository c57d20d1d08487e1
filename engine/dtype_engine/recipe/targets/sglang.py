"""Converts recipes for SGLang, which quantizes a checkpoint while it loads it: the text is the command that starts the server.

SGLang has one scheme for the whole model. An environment variable names the layers that stay wide, which SGLang compares by parts
of their names: `self_attn` is every layer with such a part, `model.layers.0` all that is below (`_module_path_match` in
`srt/layers/quantization/utils.py`). Fused layers are compared by the names of their parts, also if the model lacks one of them,
and experts as one layer, whose name ends in `experts` (`is_layer_skipped`).
"""

from __future__ import annotations

import heapq
import shlex
from collections.abc import Collection, Iterator

from dtype_engine.core.fused import siblings
from dtype_engine.recipe import online_schemes
from dtype_engine.recipe.fused_words import layer_name
from dtype_engine.recipe.online_schemes import OnlineScheme, formats_of
from dtype_engine.recipe.targets.base import Context, Match
from dtype_engine.recipe.targets.online import (
    Layer,
    Online,
    Quantized,
    always_wide,
    count_of_layers,
    is_quantized,
    layers,
)

_MADE_AS = "0.5.23"
"""The SGLang release whose options are written."""
_SHARDS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""The parts by whose names SGLang compares a layer, by the name that it has in SGLang (`_FALLBACK_FUSED_SHARDS`)."""
_FUSED = {("q_a_proj", "kv_a_proj_with_mqa"): "fused_qkv_a_proj_with_mqa"}
"""SGLang's names for other layers that it fuses. It compares these names, unless the model's class lists the parts."""
_SHARED = ("shared_expert", "shared_experts")
"""The names of experts that every token has. SGLang may pack them with the others, which then share one scheme."""
_ALL_LAYERS: tuple[str, tuple[str, ...]] = ("SGLANG_FP8_IGNORED_LAYERS", ())
_EXPERTS_ONLY = ("SGLANG_FP4_IGNORED_LAYERS", ("--moe-runner-backend", "flashinfer_trtllm"))
"""The variable that names the layers to leave wide, and further options: for most schemes, and for those of experts only."""


class SGLang(Online):
    name, title = "sglang", "SGLang"
    matcher = "names, or parts of names between dots, of layers that stay wide"
    schemes = online_schemes.SGLANG
    formats = formats_of(schemes)

    def told(self, context: Context, found: Quantized) -> tuple[str, tuple[tuple[str, str], ...], tuple[str, ...]]:
        command = ["python", "-m", "sglang.launch_server", "--model-path", "MODEL", "--dtype", found.base]
        ignored: tuple[str, ...] = ()
        before, notes = "", tuple[str, ...]()
        if found.schemes:
            scheme = next(iter(found.schemes.values()))
            variable, options = _ALL_LAYERS if scheme.linear else _EXPERTS_ONLY
            ignored = _covering(_wide_names(context, found.schemes, scheme), _names(context, found.schemes))
            before = f"{variable}={shlex.quote(','.join(ignored))} " if ignored else ""
            command += ["--quantization", scheme.name, *options]
            if any(part in _SHARED for name in context.tree.modules for part in name.split(".")):
                command.append("--disable-shared-experts-fusion")
            count = count_of_layers(context, found.schemes)
            notes = (
                f"this is for SGLang {_MADE_AS}, which then has {scheme.name} in {count:,} layers, and does not log in which",
            )
        text = f"{before}{shlex.join((*command, *found.flags))}\n"
        return text, tuple((name, found.base) for name in ignored), notes

    def refusals(self, context: Context) -> dict[str, str | None]:
        reasons = super().refusals(context)
        if is_quantized(context):
            why = "SGLang can't quantize layers of a checkpoint that is quantized already"
            return {name: reason or why for name, reason in reasons.items()}
        low = {name: context.plan.dtypes[name] for name, why in reasons.items() if why is None}
        schemes = self.schemes_of(context, low)
        values: dict[OnlineScheme, int] = {}
        for name, scheme in schemes.items():
            values[scheme] = values.get(scheme, 0) + context.tree.tensors[name].numel
        if not values:
            return reasons
        chosen = max(values, key=values.__getitem__)
        for name, scheme in schemes.items():
            if scheme is not chosen:
                reasons[name] = f"SGLang has one scheme for the whole model, here {chosen.name}"
        left = [name for name, scheme in schemes.items() if scheme is chosen]
        for name, wide in _inside_wide(context, left, chosen).items():
            reasons[name] = f"SGLang leaves it wide with {wide}, whose name is a part of its name"
        return reasons

    def match(self, context: Context, pattern: str) -> Match:
        path = pattern.rstrip(".")
        taken = {
            name for name, layer in layers(context).items() if any(path in _paths(each) for each in _compared(layer))
        }
        why = "a pattern is compared with whole parts of the names of layers"
        return Match(frozenset(taken), None if taken else why)


def _compared(layer: Layer) -> Iterator[str]:
    """Yield the names that SGLang may compare for a layer: which it does depends on the class of the model in SGLang."""
    yield from layer.names
    for name in layer.names:
        stem, dot, local = name.rpartition(".")
        yield from (f"{stem}{dot}{part}" for part in _SHARDS.get(local, ()))
        group = tuple(map(layer_name, siblings(f"{name}.weight")))
        if group in _FUSED:
            yield f"{stem}{dot}{_FUSED[group]}"


def _names(context: Context, weights: Collection[str]) -> set[str]:
    by_weight = layers(context)
    return {name for layer in {by_weight[weight] for weight in weights} for name in _compared(layer)}


def _wide_names(context: Context, low: Collection[str], scheme: OnlineScheme) -> dict[str, None]:
    """Return the names of the layers that have to be named, so that SGLang does not quantize them. low: the weights to quantize."""
    by_weight, embeddings = layers(context), frozenset({"Embedding"})
    quantized = {by_weight[name] for name in low}
    names: dict[str, None] = {}
    for weight, layer in by_weight.items():
        is_layer = layer.experts or (
            weight.endswith(".weight")
            and not always_wide(weight)
            and not context.is_kind(context.module_of(weight), embeddings)
        )
        if is_layer and layer not in quantized and (scheme.linear or layer.experts):
            names |= dict.fromkeys(_compared(layer))
    return names


def _inside_wide(context: Context, low: Collection[str], scheme: OnlineScheme) -> dict[str, str]:
    """Return the weights among `low` that SGLang would leave wide, since the name of a wide layer is a part of theirs, by the
    weight's name with the name of the wide layer.
    """
    by_weight, found = layers(context), dict[str, str]()
    while True:
        left = [name for name in low if name not in found]
        wide, more = _wide_names(context, left, scheme), dict[str, str]()
        for weight in left:
            parts = (path for name in _compared(by_weight[weight]) for path in _paths(name))
            if (above := next((path for path in parts if path in wide), None)) is not None:
                more |= dict.fromkeys(by_weight[weight].weights, above)
        if not more:
            return found
        found |= more


def _paths(name: str) -> Iterator[str]:
    """Yield the parts of a name that begin and end at dots: `a.b` has `a`, `a.b` and `b`."""
    parts = name.split(".")
    for first in range(len(parts)):
        for last in range(first, len(parts)):
            yield ".".join(parts[first : last + 1])


def _covering(names: Collection[str], others: Collection[str]) -> tuple[str, ...]:
    """Return a few paths that are parts of all `names` and of none of `others`: first those that cover most, of these the longest.
    No name is a part of one of `others`.
    """
    taken = {path for name in others for path in _paths(name)}
    covers: dict[str, set[str]] = {}
    for name in names:
        for path in _paths(name):
            if path not in taken:
                covers.setdefault(path, set()).add(name)
    queue = [(-len(covered), -len(path), path) for path, covered in covers.items()]
    heapq.heapify(queue)
    left, found = set(names), list[str]()
    while left:
        count, length, path = heapq.heappop(queue)
        covered = covers[path] & left
        if len(covered) == -count:
            found.append(path)
            left -= covered
        elif covered:
            heapq.heappush(queue, (-len(covered), length, path))
    return tuple(found)


TARGET = SGLang()
