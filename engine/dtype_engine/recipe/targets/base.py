"""Code shared by all targets. A target is a tool, such as torchao, to whose format a recipe can be converted."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import msgspec

from dtype_engine.core import dtypes
from dtype_engine.core.draft_heads import WORDS
from dtype_engine.core.llama_types import ONLY_GGUF, llama_type
from dtype_engine.core.regexes import Anchored, compile_regex
from dtype_engine.core.tree import Module, TensorInfo, Tree
from dtype_engine.core.units import plural
from dtype_engine.recipe.loader_facts import loaded_dtype
from dtype_engine.recipe.plan import Plan

Part = Literal["dtype", "scale"]


@dataclass(frozen=True)
class Context:
    """A plan, the tree of its model, and the other facts about the model that converting a recipe needs."""

    tree: Tree
    given: Plan
    """The plan. Its formats may have roundings, which other programs do not know: `plan` is without them."""
    title: str = "model"
    model_type: str | None = None
    """The `model_type` in config.json, such as "llama"."""
    kinds: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Maps each module class to its base classes' names. Many tools select modules by `isinstance`, which accepts subclasses."""
    activations: Literal["none", "weights"] = "none"
    """The run setting `quantize_activations` for which the recipe is meant."""

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan with formats instead of their roundings. A rounding changes values, not tensors, so what stores, loads or serves
        a format does so with any rounding.
        """
        if not self.roundings:
            return self.given
        planned = {name: dtypes.unrounded(dtype) for name, dtype in self.given.dtypes.items()}
        known = {name: each if each in dtypes.BY_NAME else self.given.dtypes[name] for name, each in planned.items()}
        return msgspec.structs.replace(self.given, dtypes=known)

    @functools.cached_property
    def roundings(self) -> dict[str, str]:
        """The name of the rounding of each weight whose planned format has one, by the weight's name."""
        rows = ((name, dtypes.BY_NAME.get(dtype)) for name, dtype in self.given.dtypes.items())
        return {name: row.rounding for name, row in rows if row is not None and row.rounding}

    def is_kind(self, module: Module, classes: Collection[str]) -> bool:
        """Return whether a module is an instance of one of these classes or, if its base classes are known, of a subclass."""
        name = module.class_name
        return name is not None and (name in classes or not self.kinds.get(name, frozenset()).isdisjoint(classes))

    def module_of(self, tensor: str) -> Module:
        """Return the module that directly holds the tensor with this name."""
        return self.tree.modules[tensor.rpartition(".")[0]]

    def all_names(self) -> set[str]:
        """Return every name that a pattern could match: modules, tensors, and aliases of tied weights."""
        names = {name for tensor in self.tree.tensors.values() for name in tensor.names}
        return names | {name for name in self.tree.modules if name}

    def in_scope(self) -> list[TensorInfo]:
        """Return the tensors whose dtype the rules of a recipe can change in another tool. Those of a draft head are not among
        them: it is no part of the model that transformers loads.
        """
        return [
            tensor for name, tensor in self.tree.tensors.items() if tensor.castable and name not in self.tree.of_draft
        ]


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Tensors that can't get their planned dtype or scales in the tool to which a recipe is converted."""

    why: str
    part: Part
    """What differs from the plan: the dtype of the tensors, or only the rule by which the tool computes their scales."""
    planned: str
    instead: str
    """The dtype that the target gives the tensors."""
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A recipe that was converted to the format of another tool."""

    text: str
    """The content of the file that the other tool reads."""
    patterns: tuple[tuple[str, str], ...]
    """Pairs (pattern in the tool's syntax, dtype or scheme of the tensors that it matches)."""
    base: str | None
    """The dtype of all tensors that no pattern matches and that the tool does not quantize, or None if it has no default dtype."""
    left_out: tuple[Unsupported, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """The tensors that one pattern matches in another tool."""

    tensors: frozenset[str] = frozenset()
    """Canonical names of the tensors."""
    problem: str | None = None
    """Why the pattern matches nothing, or None if it matches something or the reason is unknown."""


class Target(ABC):
    """Another tool, such as torchao, to whose format this program can convert recipes."""

    name: ClassVar[str]
    matcher: ClassVar[str]
    """How the tool matches patterns, such as by `re.match` on module names."""
    precedence: ClassVar[Literal["first", "last", "exact first"] | None] = None
    """Which pattern the tool applies if several match. "exact first": an exact name or, without one, the first. None: no order."""
    writes_caches: ClassVar[bool] = False
    """Whether `write` converts the plan's formats of KV caches, too."""
    roundings: ClassVar[Collection[str]] = ()
    """The names of the roundings that `write` converts, too. Of other roundings, a note says that the tool does not have them."""

    @abstractmethod
    def write(self, context: Context) -> Conversion:
        """Return the context's plan in the format of the tool. Callers use `convert` instead."""

    @abstractmethod
    def matchable(self, context: Context) -> frozenset[str]:
        """Return the canonical names of all tensors that the tool's patterns can affect."""

    @abstractmethod
    def match(self, context: Context, pattern: str) -> Match:
        """Return the tensors that `pattern` would match in the tool. Raises PatternError for an invalid regular expression."""

    def given_to_draft(self, tensor: TensorInfo) -> str:
        """Return the dtype that a tensor of a draft head gets. Most tools copy such tensors as stored, or leave them out."""
        return tensor.dtype

    def convert(self, context: Context) -> Conversion:
        """Return the context's plan in the format of the tool, with a list of tensors for which it can't express the plan."""
        written, losses = self.write(context), UnsupportedList()
        if not self.writes_caches:
            for name, form in context.plan.caches.items():
                losses.add(name, form, dtypes.STORED, "a recipe for this tool has no formats of KV caches")
        for name, tensor in context.tree.of_draft.items():
            planned, instead = context.plan.dtypes[name], self.given_to_draft(tensor)
            if planned != instead:
                losses.add(name, planned, instead, f"patterns for {self.name} don't reach the {WORDS}")
        notes = (*written.notes, *self._rounding_note(context, written))
        return replace(written, left_out=(*written.left_out, *losses.result()), notes=notes)

    def _rounding_note(self, context: Context, written: Conversion) -> tuple[str, ...]:
        """Return a note if the tool quantizes weights whose rounding in the plan it does not have. Otherwise, return ()."""
        lost = {name for entry in written.left_out if entry.part == "dtype" for name in entry.tensors}
        others = [
            rounding
            for name, rounding in context.roundings.items()
            if rounding not in self.roundings and name not in lost
        ]
        if not others:
            return ()
        names = " and ".join(f":{rounding}" for rounding in dict.fromkeys(others))
        return (
            f"{self.name} gets the formats alone and rounds by its own rule, not by {names}: values differ from those that were "
            f"measured in {plural(len(others), 'weight')}",
        )

    def wide_inputs_note(self, context: Context, written: Collection[str] = ()) -> tuple[str, ...]:
        """Return a note if the file leaves activations of some layers unquantized, although the recipe is for a run with quantized
        activations. Otherwise, return (). written: the dtypes of weights whose layers get quantized activations from the file.
        """
        wide = {dtype for dtype in context.plan.dtypes.values() if dtypes.quantizes_activations(dtype)}
        if context.activations == "none" or not (left := wide.difference(written)):
            return ()
        of = f" of weights in {', '.join(map(dtypes.short_name, sorted(left)))}" if left != wide else ""
        return (
            f"activations{of} stay wide in this file for {self.name}, which quantizes only weights, but the recipe quantizes "
            "activations",
        )


def tool_regex(source: str, pattern: str, kind: Anchored) -> Callable[[str], bool]:
    """Compile a regular expression from another tool's recipe, in which `.` does not match a line break. pattern: the text that the
    recipe has, such as `re:.*mlp`, for messages. kind: how much of a name must match. Raises PatternError.
    """
    return compile_regex(source, pattern, kind, dotall=False)


class UnsupportedList:
    """Collects the tensors to which a target can't give their planned dtype, and groups tensors with the same reason."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, Part, str, str], list[str]] = {}

    def add(self, tensor: str, planned: str, instead: str, why: str, part: Part = "dtype") -> None:
        self._found.setdefault((why, part, planned, instead), []).append(tensor)

    def result(self) -> tuple[Unsupported, ...]:
        return tuple(Unsupported(*reason, tuple(names)) for reason, names in self._found.items())


@dataclass(frozen=True, slots=True)
class Split:
    """The part of a plan that a quantization tool can apply."""

    low: Mapping[str, str]
    """The dtype to which each weight is to be quantized, by the weight's canonical name."""
    base: str
    """The one dtype in which the tool loads all other tensors."""
    losses: UnsupportedList
    """The tensors to which the tool can't give their planned dtype, each with the dtype that it gets instead."""

    def by_dtype(self) -> dict[str, list[str]]:
        """Return the names of the weights to quantize, keyed by dtype, in the model's order."""
        names_by_dtype: dict[str, list[str]] = {}
        for name, dtype in self.low.items():
            names_by_dtype.setdefault(dtype, []).append(name)
        return names_by_dtype

    def loading_note(self) -> str:
        return f"load the model in {self.base}, the planned dtype of everything that is not listed"


class Quantizer(Target):
    """A tool that quantizes the weights of modules of certain classes, and loads everything else in one dtype."""

    title: ClassVar[str]
    """The tool's name in sentences."""
    kinds: ClassVar[frozenset[str]]
    """The module classes whose `weight` the tool quantizes."""
    formats: ClassVar[Collection[str]]
    """The dtypes to which the tool quantizes."""
    by_transformers: ClassVar[bool] = True
    """Whether transformers loads the model, which keeps modules in float32 if the model's code requires this."""
    bases: ClassVar[Sequence[str]] = dtypes.COMPUTE_DTYPES
    """The dtypes in which the tool can load everything that it does not quantize."""

    def matchable(self, context: Context) -> frozenset[str]:
        return frozenset(self.weights(context).values())

    def weights(self, context: Context) -> dict[str, str]:
        """Return the castable weights of all modules of `kinds`, as a mapping from the module's name to the weight's name."""
        weights: dict[str, str] = {}
        for name, module in context.tree.modules.items():
            weight = module.tensors.get("weight")
            mine = weight is not None and weight.castable and weight.name not in context.tree.of_draft
            if weight is not None and mine and context.is_kind(module, self.kinds):
                weights[name] = weight.name
        return weights

    def split(self, context: Context) -> Split:
        """Return the part of the context's plan that the tool can apply."""
        planned = context.plan.dtypes
        reasons = self.refusals(context)
        low = {name: planned[name] for name, why in reasons.items() if why is None}
        refused = {name: why for name, why in reasons.items() if why is not None}
        others = [tensor for tensor in context.in_scope() if tensor.name not in low]
        base = _common_dtype([tensor for tensor in others if tensor.persistent], planned, self.bases)
        losses = UnsupportedList()
        for tensor in others:
            dtype = planned[tensor.name]
            instead = base if tensor.persistent else tensor.dtype
            reason = refused.get(tensor.name)
            if self.by_transformers and tensor.persistent:
                kept = loaded_dtype(context.tree, tensor, base)
                if kept != instead and dtype != kept:
                    reason = reason or "transformers keeps this module in float32 when it loads the model"
                instead = kept
            if reason is None and dtype != instead:
                among = f", {' or '.join(self.bases)}" if dtype not in self.bases else ""
                reason = (
                    f"{self.title} has one dtype for everything it does not quantize{among}"
                    if tensor.persistent
                    else f"{self.title} leaves non-persistent buffers as they are"
                )
            if reason is not None:
                losses.add(tensor.name, dtype, instead, reason)
        return Split(low, base, losses)

    def refusals(self, context: Context) -> dict[str, str | None]:
        """Return why the tool can't quantize a weight to its planned dtype, or None if it can, by the weight's name. Weights whose
        planned dtype has no scales are left out.
        """
        planned = {tensor: context.plan.dtypes[tensor.name] for tensor in context.in_scope()}
        return {
            tensor.name: self.refusal(context, tensor, dtype)
            for tensor, dtype in planned.items()
            if dtype in dtypes.STORAGE_DTYPES
        }

    def refusal(self, context: Context, tensor: TensorInfo, dtype: str) -> str | None:
        """Return why the tool can't quantize a tensor to this dtype, or None if it can."""
        tool, blocks = self.title, dtypes.BY_NAME[dtype].blocks
        if tensor.kind != "parameter" or tensor.name.rpartition(".")[2] != "weight":
            return f"{tool} quantizes the parameters named 'weight' only"
        if not context.is_kind(context.module_of(tensor.name), self.kinds):
            return f"{tool} quantizes {', '.join(sorted(self.kinds))} only"
        if len(tensor.shape) < 2:
            return f"{tool} quantizes matrices only"
        if tensor.aliases:
            return f"the weight is tied, and {tool} would untie it"
        if llama_type(dtype) is not None:
            return f"{tool} has no {dtype}: {ONLY_GGUF}"
        if dtype not in self.formats:
            return f"{tool} has no {dtypes.short_name(dtype)}"
        if blocks is not None and len(tensor.shape) > 2:
            return f"{tool} has blocks for matrices only"
        if blocks is not None and blocks.rows == 1 and dtypes.padded(tensor.shape, dtype):
            return f"{tool} needs rows of a multiple of {blocks.columns} values"
        return None


def _common_dtype(tensors: Sequence[TensorInfo], planned: Mapping[str, str], among: Sequence[str]) -> str:
    """Return the dtype of `among` that most elements of these tensors have under the plan. If no tensor has one of them there, the
    stored dtypes decide. If these are others, too, the result is float32 or, if that is not in `among`, the first of them.
    """
    for dtype_by_name in (planned, {tensor.name: tensor.dtype for tensor in tensors}):
        elements = dict.fromkeys(among, 0)
        for tensor in tensors:
            if (dtype := dtype_by_name[tensor.name]) in elements:
                elements[dtype] += tensor.numel
        if any(elements.values()):
            return max(elements, key=elements.__getitem__)  # on a tie, the first in the table
    return "float32" if "float32" in among else among[0]


def as_comment(lines: Iterable[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)
