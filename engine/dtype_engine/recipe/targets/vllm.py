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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dtype_engine.core import dtypes
from dtype_engine.core.fused import fused_name, siblings
from dtype_engine.core.tree import TensorInfo, numbered_parts
from dtype_engine.recipe.fused_words import layer_name
from dtype_engine.recipe.kv_serving import cache_serving
from dtype_engine.recipe.online_schemes import FORMATS, OnlineScheme, Shape, scheme_for
from dtype_engine.recipe.presets import HEADS
from dtype_engine.recipe.rules import Recipe, Rule
from dtype_engine.recipe.serving import ROUTERS, whole_when_fused
from dtype_engine.recipe.targets.base import Context, Conversion, Match, Quantizer, UnsupportedList, tool_regex
from dtype_engine.recipe.targets.name_patterns import regexes

_MADE_AS = "0.33"
"""The vLLM release whose options are written."""
_EXPERT = re.compile(r"(.*\bexperts)\.(?:[0-9]+\.)?[^.]+(?:\.weight)?")
"""Matches the name of a weight of experts. The group is vLLM's name for the layer that all of them are."""
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer of vLLM, which has one scheme."""

    names: tuple[str, ...]
    """The names that vLLM compares with patterns: those of the weights' modules, also of any that the model lacks."""
    weights: tuple[str, ...]
    """Canonical names of the weights."""
    words: str
    """What the weights are in vLLM, for messages."""
    experts: bool = False


class VLLM(Quantizer):
    name, title = "vllm", "vLLM"
    matcher = "'re:' and re.match, globs or exact names, on the layers of the checkpoint"
    kinds = frozenset({"Linear"})
    formats = FORMATS
    by_transformers = False
    bases = ("bfloat16", "float16")
    writes_caches = True

    def write(self, context: Context) -> Conversion:
        parts = self.split(context)
        found = _schemes(context, parts.low)
        layers = _layers(context)
        universe = {name for layer in layers.values() for name in layer.names}
        by_scheme: dict[OnlineScheme, dict[str, None]] = {}
        for weight, scheme in found.items():
            by_scheme.setdefault(scheme, {}).update(dict.fromkeys(layers[weight].names))
        patterns = [
            (f"re:{regex}$", scheme.name) for scheme, names in by_scheme.items() for regex in regexes(names, universe)
        ]
        _other_scales(context, found, parts.losses)
        flags, notes = _of_caches(context, parts.losses)
        text = {"targets": dict(patterns)}
        command = ["vllm", "serve", "MODEL", "--dtype", parts.base]
        if patterns:
            # Beside the scheme of a quantized checkpoint, only the option itself adds layers that are quantized online.
            command += [] if _is_quantized(context) else ["--quantization", "online"]
            command += ["--quantization-config", json.dumps(text)]
            count = len({layers[weight] for weight in found})
            form = f"this is the form that vLLM {_MADE_AS} reads, with the names of the checkpoint"
            notes = (f"{form}: it logs how many layers it quantizes, {count:,} if it knows them by these", *notes)
        else:
            notes = ("there is nothing to quantize in this plan", *notes)
        notes = (shlex.join((*command, *flags)), *notes, *_input_notes(context, found))
        written = json.dumps(text, indent=2) + "\n"
        return Conversion(written, tuple(patterns), parts.base, parts.losses.result(), notes)

    def served(self, context: Context) -> Recipe:
        """Return the recipe whose values are those that vLLM computes with, if it gets what `write` returns for the context."""
        parts = self.split(context)
        universe = {name for tensor in context.tree.tensors.values() for name in (*tensor.names, *tensor.stored_as)}
        universe |= context.all_names()
        rules = [Rule("*", parts.base)]
        measured: dict[str, list[str]] = {}
        for weight, scheme in _schemes(context, parts.low).items():
            measured.setdefault(scheme.measured(_shape(context.tree.tensors[weight])), []).append(weight)
        for form, names in measured.items():
            rules += [Rule(f"re:{regex}", form) for regex in regexes(names, universe)]
        kept: dict[str, list[str]] = {}
        for name in context.tree.of_draft:
            kept.setdefault(context.plan.dtypes[name], []).append(name)
        for form, names in kept.items():
            rules += [Rule(f"re:{regex}", form) for regex in regexes(names, universe)]
        refused = _refused_caches(context)
        rules += [Rule(name, form) for name, form in context.plan.caches.items() if name not in refused]
        return Recipe(tuple(rules))

    def quantizes_activations(self, context: Context) -> bool:
        """Return whether vLLM rounds the inputs of some layer that it quantizes."""
        return any(
            dtypes.quantizes_activations(scheme.measured(_shape(context.tree.tensors[weight])))
            for weight, scheme in _schemes(context, self.split(context).low).items()
        )

    def refusals(self, context: Context) -> dict[str, str | None]:
        reasons = super().refusals(context)
        planned = context.plan.dtypes
        for layer in dict.fromkeys(_layers(context).values()):
            schemes = {
                weight: scheme_for(planned[weight], _shape(context.tree.tensors[weight]))
                for weight in layer.weights
                if reasons.get(weight, "") is None
            }
            if len(schemes) == len(layer.weights) and len(set(schemes.values())) == 1:
                continue
            for weight in schemes:
                reasons[weight] = f"vLLM has one scheme for {layer.words}"
        return reasons

    def refusal(self, context: Context, tensor: TensorInfo, dtype: str) -> str | None:
        layer = _layer_of(context, tensor)
        if layer_name(tensor.name) in ROUTERS:
            return "vLLM leaves routers wide"
        if layer_name(tensor.name) in HEADS and not numbered_parts(tensor.name):
            return "vLLM leaves output layers wide"
        if not (layer.experts and len(tensor.shape) == 3):
            if why := super().refusal(context, tensor, dtype):
                return why
        elif not _is_upright(context, tensor):
            return "it is not known in which order vLLM would pack these experts"
        elif dtype not in self.formats:
            return f"vLLM has no {dtypes.short_name(dtype)}"
        scheme = scheme_for(dtype, _shape(tensor))
        if scheme is None:
            return f"vLLM has no {dtypes.short_name(dtype)} for {'experts' if layer.experts else 'linear layers'}"
        if not (scheme.linear or layer.experts):
            return f"vLLM has {scheme.name} for experts only"
        blocks = dtypes.BY_NAME[scheme.measured(_shape(tensor))].blocks
        if blocks is not None and blocks.rows == 1 and tensor.shape[-1] % blocks.columns:
            return f"vLLM needs rows of a multiple of {blocks.columns} values"
        return None

    def matchable(self, context: Context) -> frozenset[str]:
        wide = (*ROUTERS, *HEADS)
        return frozenset(
            name
            for name, layer in _layers(context).items()
            if layer.experts or (layer_name(name) not in wide and context.is_kind(context.module_of(name), self.kinds))
        )

    def match(self, context: Context, pattern: str) -> Match:
        is_regex = pattern.startswith("re:")
        glob = re.compile(fnmatch.translate(pattern)).match
        matches: Callable[[str], object] = tool_regex(pattern[3:], pattern, "match") if is_regex else glob
        taken: set[str] = set()
        for layer in dict.fromkeys(_layers(context).values()):
            if layer.experts:
                taken.update(layer.weights if any(map(matches, layer.names)) else ())
            elif (fused := fused_name(layer.weights) if len(layer.weights) > 1 else "") and matches(fused):
                taken.update(layer.weights)
            else:
                tensors = context.tree.tensors
                taken.update(name for name in layer.weights if any(map(matches, _checkpoint_names(tensors[name]))))
        why = "a pattern is compared with the names of layers, not of weights"
        return Match(frozenset(taken), None if taken else why)


def _shape(tensor: TensorInfo) -> Shape:
    return "stack" if len(tensor.shape) == 3 else "matrix"


def _checkpoint_names(tensor: TensorInfo) -> tuple[str, ...]:
    """Return the names of the modules that hold a weight in the checkpoint."""
    return tuple(name.removesuffix(".weight") for name in tensor.stored_as or (tensor.name,))


def _layers(context: Context) -> dict[str, _Layer]:
    """Return vLLM's layer of every weight with two or three dimensions, by the weight's name."""
    found: dict[str, _Layer] = {}
    experts: dict[str, list[str]] = {}
    for tensor in context.in_scope():
        if len(tensor.shape) not in (2, 3) or tensor.kind != "parameter" or tensor.name in found:
            continue
        layer = _layer_of(context, tensor)
        if layer.experts:
            experts.setdefault(layer.names[0], []).append(tensor.name)
        else:
            found |= dict.fromkeys(layer.weights, layer)
    for name, weights in experts.items():
        found |= dict.fromkeys(weights, _Layer((name,), tuple(weights), "all experts of a layer", True))
    return found


def _layer_of(context: Context, tensor: TensorInfo) -> _Layer:
    """Return the layer of one weight. Of experts, it has this weight alone."""
    names = _checkpoint_names(tensor)
    if (expert := _EXPERT.fullmatch(names[0])) is not None:
        return _Layer((expert[1],), (tensor.name,), "all experts of a layer", True)
    group = siblings(tensor.name)
    present = tuple(name for name in group if name in context.tree.tensors)
    if len(present) < 2:
        return _Layer(names, (tensor.name,), "this layer")
    words = f"{', '.join(map(layer_name, present))}, which it fuses"
    return _Layer(tuple(_sibling_names(context, group)), present, words)


def _sibling_names(context: Context, group: tuple[str, ...]) -> Iterator[str]:
    """Yield the checkpoint's names of all layers in a fused group, also of those that the model lacks."""
    tensors = context.tree.tensors
    stem = next(_checkpoint_names(tensors[name])[0] for name in group if name in tensors).rpartition(".")[0]
    for name in group:
        yield from _checkpoint_names(tensors[name]) if name in tensors else (f"{stem}.{layer_name(name)}",)


def _is_upright(context: Context, tensor: TensorInfo) -> bool:
    """Return whether packed experts are [experts, outputs, inputs], as vLLM holds them. transformers packs them so if the files
    store each expert. If they are packed in the files, the shapes of a layer's two weights tell it.
    """
    if len(tensor.stored_as) > 1:
        return True
    module = context.module_of(tensor.name)
    shapes = {local: each.shape for local, each in module.tensors.items() if len(each.shape) == 3}
    up, down = shapes.get("gate_up_proj"), shapes.get("down_proj")
    return up is not None and down is not None and up[1] == 2 * down[2] and up[2] == down[1]


def _schemes(context: Context, low: Mapping[str, str]) -> dict[str, OnlineScheme]:
    """Return the scheme of each weight that vLLM quantizes, by name. low: their planned formats."""
    found = {name: scheme_for(dtype, _shape(context.tree.tensors[name])) for name, dtype in low.items()}
    return {name: scheme for name, scheme in found.items() if scheme is not None}


def _other_scales(context: Context, found: Mapping[str, OnlineScheme], losses: UnsupportedList) -> None:
    """Add the weights whose scales in vLLM are not those of the plan, or not those that are measured for their scheme."""
    tree = context.tree
    layers = _layers(context)
    for name, scheme in found.items():
        tensor, planned, layer = tree.tensors[name], context.plan.dtypes[name], layers[name]
        shape = _shape(tensor)
        alone = shape == "matrix" and len(layer.weights) == 1 and not layer.experts
        same = planned in scheme.same[shape] or (alone and planned.endswith(dtypes.PER_TENSOR) and not layer.experts)
        if not same:
            measured = scheme.measured(shape)
            unknown = ", which is not measured" if measured == planned else ""
            losses.add(name, planned, measured, f"vLLM has {scheme.scales}{unknown}", "scale")
        elif scheme.name == "fp8_per_block" and not _whole_blocks(context, tensor, layer):
            why = "vLLM's blocks do not begin with each of the weights that it fuses, which is not measured"
            losses.add(name, planned, planned, why, "scale")


def _whole_blocks(context: Context, tensor: TensorInfo, layer: _Layer) -> bool:
    """Return whether vLLM divides a weight into the same blocks of 128 x 128 as this program."""
    if len(tensor.shape) == 3:
        halves = 2 if tensor.name.endswith("gate_up_proj") else 1
        return tensor.shape[1] % (halves * _BLOCK) == 0
    return layer.experts or whole_when_fused(context.tree, tensor.name, "fp8@128x128")


def _is_quantized(context: Context) -> bool:
    """Return whether the checkpoint has quantized weights."""
    tensors = context.tree.tensors.values()
    return any(tensor.own_codes or tensor.dtype not in dtypes.BY_NAME for tensor in tensors)


def _refused_caches(context: Context) -> set[str]:
    served = cache_serving(context.tree, context.plan.caches, "vllm")
    return {name for problem in served.problems if problem.refused for name in problem.tensors}


def _of_caches(context: Context, losses: UnsupportedList) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (the options that give KV caches the plan's formats, notes). Adds the formats that vLLM does not have."""
    served = cache_serving(context.tree, context.plan.caches, "vllm")
    for problem in served.problems:
        for name in problem.tensors if problem.refused else ():
            losses.add(name, context.plan.caches[name], dtypes.STORED, problem.why)
    notes = [f"KV cache: {problem.why}" for problem in served.problems if not problem.refused]
    return served.flags, tuple(notes)


def _input_notes(context: Context, found: Mapping[str, OnlineScheme]) -> Iterator[str]:
    """Yield notes on values that vLLM has and no recipe does."""
    if not found:
        return
    tensors = context.tree.tensors
    experts = {scheme.name for name, scheme in found.items() if _layer_of(context, tensors[name]).experts}
    for scheme in dict.fromkeys(found.values()):
        notes = (scheme.inputs, scheme.inputs_of_experts if scheme.name in experts else "")
        yield from filter(None, notes)
    rounds = any(dtypes.quantizes_activations(scheme.measured("matrix")) for scheme in found.values())
    if rounds and context.activations == "none":
        yield "vLLM also rounds the inputs of layers that it quantizes, which the recipe leaves wide: drift --as vllm measures both"
    wide = [name for name in found if dtypes.BY_NAME[tensors[name].dtype].bits > 16]
    if wide:
        yield f"vLLM rounds weights to --dtype before it quantizes them, which is not measured: {len(wide):,} are stored in float32"


TARGET = VLLM()
