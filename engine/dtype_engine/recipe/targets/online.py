"""Code shared by runtimes that quantize a checkpoint while they load it, without an export: what their layers are, which scheme a
layer gets, what a recipe has beyond that, and with which formats that is measured.

A layer of a runtime has one scheme. It may be several weights of the model: those that the runtime fuses, and all experts.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from dtype_engine.core import dtypes
from dtype_engine.core.draft_heads import Runtime
from dtype_engine.core.fused import siblings
from dtype_engine.core.tree import TensorInfo, numbered_parts
from dtype_engine.recipe.fused_words import layer_name
from dtype_engine.recipe.kv_serving import cache_serving
from dtype_engine.recipe.online_schemes import OnlineScheme, Shape, scheme_for
from dtype_engine.recipe.presets import HEADS
from dtype_engine.recipe.rules import Recipe, Rule
from dtype_engine.recipe.serving import ROUTERS, whole_when_fused
from dtype_engine.recipe.targets.base import Context, Conversion, Quantizer, UnsupportedList
from dtype_engine.recipe.targets.name_patterns import regexes

_EXPERT = re.compile(r"(.*\bexperts)\.(?:[0-9]+\.)?[^.]+(?:\.weight)?")
"""Matches the name of a weight of experts. The group is the name that runtimes have for the layer that all of them are."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a runtime, which has one scheme."""

    names: tuple[str, ...]
    """The names that the runtime compares with patterns: those of the weights' modules, also of any that the model lacks."""
    weights: tuple[str, ...]
    """Canonical names of the weights."""
    words: str
    """What the weights are in the runtime, for messages."""
    experts: bool = False


@dataclass(frozen=True, slots=True)
class Quantized:
    """What a runtime is to quantize of a plan, and what it needs to be told beside that."""

    schemes: Mapping[str, OnlineScheme]
    """The scheme of each weight that the runtime quantizes, by the weight's name."""
    base: str
    """The one dtype of everything else."""
    flags: tuple[str, ...]
    """The options that give KV caches their formats."""


class Online(Quantizer):
    """A runtime that quantizes a checkpoint while it loads it."""

    name: ClassVar[Runtime]
    schemes: ClassVar[tuple[OnlineScheme, ...]]
    """The schemes that the runtime has."""
    kinds = frozenset({"Linear"})
    by_transformers = False
    bases = ("bfloat16", "float16")
    writes_caches = True

    @abstractmethod
    def told(self, context: Context, found: Quantized) -> tuple[str, tuple[tuple[str, str], ...], tuple[str, ...]]:
        """Return what the runtime is told: the text and the patterns of a `Conversion`, and notes on how to use the text."""

    def write(self, context: Context) -> Conversion:
        parts = self.split(context)
        schemes = self.schemes_of(context, parts.low)
        self._add_other_scales(context, schemes, parts.losses)
        flags, of_caches = self._of_caches(context, parts.losses)
        text, patterns, notes = self.told(context, Quantized(schemes, parts.base, flags))
        if not schemes:
            notes = (*notes, "there is nothing to quantize in this plan")
        notes = (*notes, *of_caches, *self._input_notes(context, schemes))
        return Conversion(text, patterns, parts.base, parts.losses.result(), notes)

    def served(self, context: Context) -> Recipe:
        """Return the recipe whose values are those that the runtime computes with, if it gets what `write` returns."""
        parts = self.split(context)
        universe = {name for tensor in context.tree.tensors.values() for name in (*tensor.names, *tensor.stored_as)}
        universe |= context.all_names()
        rules = [Rule("*", parts.base)]
        measured: dict[str, list[str]] = {}
        for weight, scheme in self.schemes_of(context, parts.low).items():
            measured.setdefault(scheme.measured(_shape(context.tree.tensors[weight])), []).append(weight)
        for form, names in measured.items():
            rules += [Rule(f"re:{regex}", form) for regex in regexes(names, universe)]
        kept: dict[str, list[str]] = {}
        for name in context.tree.of_draft:
            kept.setdefault(context.plan.dtypes[name], []).append(name)
        for form, names in kept.items():
            rules += [Rule(f"re:{regex}", form) for regex in regexes(names, universe)]
        refused = self._refused_caches(context)
        rules += [Rule(name, form) for name, form in context.plan.caches.items() if name not in refused]
        return Recipe(tuple(rules))

    def quantizes_activations(self, context: Context) -> bool:
        """Return whether the runtime rounds the inputs of some layer that it quantizes."""
        return any(
            dtypes.quantizes_activations(scheme.measured(_shape(context.tree.tensors[weight])))
            for weight, scheme in self.schemes_of(context, self.split(context).low).items()
        )

    def refusals(self, context: Context) -> dict[str, str | None]:
        reasons = super().refusals(context)
        for layer in dict.fromkeys(layers(context).values()):
            accepted = [weight for weight in layer.weights if reasons.get(weight, "") is None]
            schemes = set(
                self.schemes_of(context, {weight: context.plan.dtypes[weight] for weight in accepted}).values()
            )
            if len(accepted) == len(layer.weights) and len(schemes) == 1:
                continue
            for weight in accepted:
                reasons[weight] = f"{self.title} has one scheme for {layer.words}"
        return reasons

    def refusal(self, context: Context, tensor: TensorInfo, dtype: str) -> str | None:
        title, layer = self.title, _layer_of(context, tensor)
        if what := always_wide(tensor.name):
            return f"{title} leaves {what} wide"
        if not (layer.experts and len(tensor.shape) == 3):
            if why := super().refusal(context, tensor, dtype):
                return why
        elif not _is_upright(context, tensor):
            return f"it is not known in which order {title} would pack these experts"
        elif dtype not in self.formats:
            return f"{title} has no {dtypes.short_name(dtype)}"
        scheme = scheme_for(self.schemes, dtype, _shape(tensor))
        if scheme is None:
            return f"{title} has no {dtypes.short_name(dtype)} for {'experts' if layer.experts else 'linear layers'}"
        if not (scheme.linear or layer.experts):
            return f"{title} has {scheme.name} for experts only"
        blocks = dtypes.BY_NAME[scheme.measured(_shape(tensor))].blocks
        if blocks is not None and blocks.rows == 1 and tensor.shape[-1] % blocks.columns:
            return f"{title} needs rows of a multiple of {blocks.columns} values"
        return None

    def matchable(self, context: Context) -> frozenset[str]:
        return frozenset(
            name
            for name, layer in layers(context).items()
            if layer.experts or (context.is_kind(context.module_of(name), self.kinds) and not always_wide(name))
        )

    def schemes_of(self, context: Context, low: Mapping[str, str]) -> dict[str, OnlineScheme]:
        """Return the scheme of each weight that the runtime quantizes, by name. low: their planned formats."""
        found = {
            name: scheme_for(self.schemes, dtype, _shape(context.tree.tensors[name])) for name, dtype in low.items()
        }
        return {name: scheme for name, scheme in found.items() if scheme is not None}

    def _add_other_scales(self, context: Context, schemes: Mapping[str, OnlineScheme], losses: UnsupportedList) -> None:
        """Add the weights whose scales in the runtime are not those of the plan, or not those that are measured."""
        tree = context.tree
        by_weight = layers(context)
        for name, scheme in schemes.items():
            tensor, planned, layer = tree.tensors[name], context.plan.dtypes[name], by_weight[name]
            shape = _shape(tensor)
            measured = scheme.measured(shape)
            alone = shape == "matrix" and len(layer.weights) == 1
            as_fused = planned.replace(dtypes.PER_TENSOR, "@fused") if alone else planned
            if planned not in scheme.same[shape] and as_fused not in scheme.same[shape]:
                unknown = ", which is not measured" if measured == planned else ""
                losses.add(name, planned, measured, f"{self.title} has {scheme.scales}{unknown}", "scale")
            elif not _whole_blocks(context, tensor, layer, measured):
                why = (
                    f"{self.title}'s blocks do not begin with each of the weights that it fuses, which is not measured"
                )
                losses.add(name, planned, planned, why, "scale")

    def _refused_caches(self, context: Context) -> set[str]:
        served = cache_serving(context.tree, context.plan.caches, self.name)
        return {name for problem in served.problems if problem.refused for name in problem.tensors}

    def _of_caches(self, context: Context, losses: UnsupportedList) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return (the options that give KV caches the plan's formats, notes). Adds the formats that the runtime does not have."""
        served = cache_serving(context.tree, context.plan.caches, self.name)
        for problem in served.problems:
            for name in problem.tensors if problem.refused else ():
                losses.add(name, context.plan.caches[name], dtypes.STORED, problem.why)
        notes = [f"KV cache: {problem.why}" for problem in served.problems if not problem.refused]
        return served.flags, tuple(notes)

    def _input_notes(self, context: Context, schemes: Mapping[str, OnlineScheme]) -> Iterator[str]:
        """Yield notes on values that the runtime has and no recipe does."""
        if not schemes:
            return
        title, tensors = self.title, context.tree.tensors
        of_experts = {scheme.name for name, scheme in schemes.items() if _layer_of(context, tensors[name]).experts}
        for scheme in dict.fromkeys(schemes.values()):
            notes = (scheme.inputs, scheme.inputs_of_experts if scheme.name in of_experts else "")
            yield from filter(None, notes)
        rounds = any(dtypes.quantizes_activations(scheme.measured("matrix")) for scheme in schemes.values())
        if rounds and context.activations == "none":
            also = f"{title} also rounds the inputs of layers that it quantizes, which the recipe leaves wide"
            yield f"{also}: drift --as {self.name} measures both"
        wide = [name for name in schemes if dtypes.BY_NAME[tensors[name].dtype].bits > 16]
        if wide:
            how = f"{title} rounds weights to --dtype before it quantizes them, which is not measured"
            yield f"{how}: {len(wide):,} are stored in float32"


def always_wide(name: str) -> str:
    """Return what the weight `name` belongs to if runtimes leave it wide under any scheme, in words for the user, or ""."""
    if layer_name(name) in ROUTERS:
        return "routers"
    return "output layers" if layer_name(name) in HEADS and not numbered_parts(name) else ""


def layers(context: Context) -> dict[str, Layer]:
    """Return the runtime's layer of every weight with two or three dimensions, by the weight's name."""
    found: dict[str, Layer] = {}
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
        found |= dict.fromkeys(weights, Layer((name,), tuple(weights), "all experts of a layer", True))
    return found


def count_of_layers(context: Context, weights: Iterable[str]) -> int:
    """Return how many layers of the runtime these weights are."""
    by_weight = layers(context)
    return len({by_weight[weight] for weight in weights})


def checkpoint_names(tensor: TensorInfo) -> tuple[str, ...]:
    """Return the names of the modules that hold a weight in the checkpoint."""
    return tuple(name.removesuffix(".weight") for name in tensor.stored_as or (tensor.name,))


def is_quantized(context: Context) -> bool:
    """Return whether the checkpoint has quantized weights."""
    tensors = context.tree.tensors.values()
    return any(tensor.own_codes or tensor.dtype not in dtypes.BY_NAME for tensor in tensors)


def _shape(tensor: TensorInfo) -> Shape:
    if len(tensor.shape) == 3:
        return "stack"
    return "expert" if _EXPERT.fullmatch(checkpoint_names(tensor)[0]) else "matrix"


def _layer_of(context: Context, tensor: TensorInfo) -> Layer:
    """Return the layer of one weight. Of experts, it has this weight alone."""
    names = checkpoint_names(tensor)
    if (expert := _EXPERT.fullmatch(names[0])) is not None:
        return Layer((expert[1],), (tensor.name,), "all experts of a layer", True)
    group = siblings(tensor.name)
    present = tuple(name for name in group if name in context.tree.tensors)
    if len(present) < 2:
        return Layer(names, (tensor.name,), "this layer")
    words = f"{', '.join(map(layer_name, present))}, which it fuses"
    return Layer(tuple(_sibling_names(context, group)), present, words)


def _sibling_names(context: Context, group: tuple[str, ...]) -> Iterator[str]:
    """Yield the checkpoint's names of all layers in a fused group, also of those that the model lacks."""
    tensors = context.tree.tensors
    stem = next(checkpoint_names(tensors[name])[0] for name in group if name in tensors).rpartition(".")[0]
    for name in group:
        yield from checkpoint_names(tensors[name]) if name in tensors else (f"{stem}.{layer_name(name)}",)


def _is_upright(context: Context, tensor: TensorInfo) -> bool:
    """Return whether packed experts are [experts, outputs, inputs], as runtimes hold them. transformers packs them so if the files
    store each expert. If they are packed in the files, the shapes of a layer's two weights tell it.
    """
    if len(tensor.stored_as) > 1:
        return True
    module = context.module_of(tensor.name)
    shapes = {local: each.shape for local, each in module.tensors.items() if len(each.shape) == 3}
    up, down = shapes.get("gate_up_proj"), shapes.get("down_proj")
    return up is not None and down is not None and up[1] == 2 * down[2] and up[2] == down[1]


def _whole_blocks(context: Context, tensor: TensorInfo, layer: Layer, measured: str) -> bool:
    """Return whether the runtime divides a weight into the same blocks as this program, if a block has several rows."""
    blocks = dtypes.BY_NAME[measured].blocks
    if blocks is None or blocks.rows == 1:
        return True
    if len(tensor.shape) == 3:
        halves = 2 if tensor.name.endswith("gate_up_proj") else 1
        return tensor.shape[1] % (halves * blocks.rows) == 0
    return layer.experts or whole_when_fused(context.tree, tensor.name, measured)
