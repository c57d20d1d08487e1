"""What every target has in common: the plan it is given, what comes out, and the list of what it can't express."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dtype_engine.core import dtypes
from dtype_engine.core.tree import Module, TensorInfo, Tree, ancestors
from dtype_engine.recipe.plan import Plan
from dtype_engine.recipe.regexes import Anchored, compile_regex

Part = Literal["dtype", "scale"]


@dataclass(frozen=True, slots=True)
class Context:
    """A plan, the tree it belongs to, and what a target needs to know about the model besides.

    `kinds` has, for a module class, the names of the classes it is a subclass of: many tools ask `isinstance`.
    `activations`: the run setting `quantize_activations` that the recipe is for.
    """

    tree: Tree
    plan: Plan
    title: str = "model"
    model_type: str | None = None
    kinds: Mapping[str, frozenset[str]] = field(default_factory=dict)
    activations: Literal["none", "weights"] = "none"

    def is_kind(self, module: Module, classes: Collection[str]) -> bool:
        """Whether a module is an instance of one of these classes, or of a subclass as far as those are known."""
        name = module.class_name
        return name is not None and (name in classes or not self.kinds.get(name, frozenset()).isdisjoint(classes))

    def module_of(self, tensor: str) -> Module:
        """The module that holds a tensor itself."""
        return self.tree.modules[tensor.rpartition(".")[0]]

    def all_names(self) -> set[str]:
        """Every name that a pattern could meet: modules, tensors, and the further names of tied weights."""
        names = {name for tensor in self.tree.tensors.values() for name in tensor.names}
        return names | {name for name in self.tree.modules if name}

    def in_scope(self) -> list[TensorInfo]:
        """The tensors that rules can change."""
        return [tensor for tensor in self.tree.tensors.values() if tensor.castable]


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Tensors whose plan the target can't express, why, and what they get instead.

    `part` is "scale" where the dtype is right and only the scales are not those of the plan.
    """

    why: str
    part: Part
    planned: str
    instead: str
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A recipe in another tool's words.

    `text` is what to write to a file; `patterns` are the target's own patterns and the dtype each stands for;
    `base` the dtype of everything that no pattern takes, where there is one.
    """

    text: str
    patterns: tuple[tuple[str, str], ...]
    base: str | None
    left_out: tuple[Unsupported, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """What a pattern takes in a target's matcher, by canonical tensor names; `problem` says why it takes nothing."""

    tensors: frozenset[str]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A target: how to write for it, and how it reads.

    `matchable` gives the tensors that its patterns can have an effect on at all. `match` reads a pattern as the target does, and
    raises PatternError where it means nothing to its regular expressions.
    `precedence` gives the index of the one that wins among patterns that all match; None where a tool has no order.
    """

    name: str
    matcher: str
    precedence: Callable[[Sequence[str]], int] | None
    convert: Callable[[Context], Conversion]
    matchable: Callable[[Context], frozenset[str]]
    match: Callable[[Context, str], Match]


def matcher(source: str, pattern: str, kind: Anchored) -> Callable[[str], object]:
    """A tool's regular expression, without the flag that ours have. Raises PatternError."""
    return compile_regex(source, pattern, kind, dotall=False)


def first(patterns: Sequence[str]) -> int:
    """The first pattern that matches wins."""
    return 0


def last(patterns: Sequence[str]) -> int:
    """The last pattern that matches wins."""
    return len(patterns) - 1


def exact_first(patterns: Sequence[str]) -> int:
    """An exact name goes before expressions, whatever the order."""
    return next((index for index, pattern in enumerate(patterns) if not pattern.startswith("re:")), 0)


class UnsupportedList:
    """Gathers what is left out, tensor by tensor, and puts tensors with the same reason together."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, Part, str, str], list[str]] = {}

    def add(self, tensor: str, planned: str, instead: str, why: str, part: Part = "dtype") -> None:
        self._found.setdefault((why, part, planned, instead), []).append(tensor)

    def result(self) -> tuple[Unsupported, ...]:
        return tuple(Unsupported(*reason, tuple(names)) for reason, names in self._found.items())


@dataclass(frozen=True, slots=True)
class Split:
    """A plan as quantisers see it: weights to quantise (`low`, by dtype), and one dtype for all the rest."""

    low: Mapping[str, str]
    base: str
    losses: UnsupportedList

    def by_dtype(self) -> dict[str, list[str]]:
        """The weights to quantise, per dtype, in the model's order."""
        names_by_dtype: dict[str, list[str]] = {}
        for name, dtype in self.low.items():
            names_by_dtype.setdefault(dtype, []).append(name)
        return names_by_dtype


def split(
    context: Context,
    tool: str,
    formats: Collection[str],
    kinds: Collection[str],
    by_transformers: bool = True,
    also: Callable[[Module, str], str | None] = lambda module, dtype: None,
) -> Split:
    """Which weights a quantiser can take as planned, and what is left out.

    Such tools quantise the `weight` of modules of certain classes, and load everything else in one dtype.
    `by_transformers` says that transformers does that loading, which keeps in float32 what the model declares so. `also` gives
    why a tool does not take the weight of a module into a dtype that it has, None where it does.
    """
    planned = context.plan.dtypes
    losses = UnsupportedList()
    low: dict[str, str] = {}
    refused: dict[str, str] = {}
    for tensor in context.in_scope():
        dtype = planned[tensor.name]
        if dtype in dtypes.STORAGE_DTYPES:
            why = _refusal(context, tensor, dtype, tool, formats, kinds)
            why = why or also(context.module_of(tensor.name), dtype)
            if why is None:
                low[tensor.name] = dtype
            else:
                refused[tensor.name] = why
    base = _common_dtype(
        [tensor for tensor in context.in_scope() if tensor.persistent and tensor.name not in low], planned
    )
    for tensor in context.in_scope():
        if tensor.name in low:
            continue
        dtype = planned[tensor.name]
        instead = base if tensor.persistent else tensor.dtype
        why = refused.get(tensor.name)
        if by_transformers and tensor.persistent and instead != (kept := loaded_dtype(context, tensor, base)):
            instead = kept
            if why is None and dtype != kept:
                why = "transformers keeps this module in float32 when it loads the model"
        if why is None and dtype != instead:
            why = (
                f"{tool} has one dtype for everything it does not quantise"
                if tensor.persistent
                else f"{tool} leaves non-persistent buffers as they are"
            )
        if why is not None:
            losses.add(tensor.name, dtype, instead, why)
    return Split(low, base, losses)


def _refusal(
    context: Context, tensor: TensorInfo, dtype: str, tool: str, formats: Collection[str], kinds: Collection[str]
) -> str | None:
    """Why a quantiser can't take a tensor into a storage-only dtype; None when it can."""
    module = context.module_of(tensor.name)
    if tensor.kind != "parameter" or not tensor.name.endswith("weight") or tensor.name.rpartition(".")[2] != "weight":
        return f"{tool} quantises the parameters named 'weight' only"
    if not context.is_kind(module, kinds):
        return f"{tool} quantises {', '.join(sorted(kinds))} only"
    if len(tensor.shape) < 2:
        return f"{tool} quantises matrices only"
    if tensor.aliases:
        return f"the weight is tied, and {tool} would part it from its other names"
    if dtype not in formats:
        return f"{tool} has no {dtypes.short_name(dtype)}"
    blocks = dtypes.BY_NAME[dtype].blocks
    if blocks is not None and len(tensor.shape) > 2:
        return f"{tool} has blocks for matrices only"
    if blocks is not None and blocks.rows == 1 and dtypes.padded(tensor.shape, dtype):
        return f"{tool} needs rows of a multiple of {blocks.columns} values"
    return None


def _common_dtype(tensors: Sequence[TensorInfo], planned: Mapping[str, str]) -> str:
    """The computed dtype that most elements are planned in; where none is, the one that most are stored in."""
    for dtype_by_name in (planned, {tensor.name: tensor.dtype for tensor in tensors}):
        elements = dict.fromkeys(dtypes.COMPUTE_DTYPES, 0)
        for tensor in tensors:
            if (dtype := dtype_by_name[tensor.name]) in elements:
                elements[dtype] += tensor.numel
        if any(elements.values()):
            return max(elements, key=elements.__getitem__)  # of equals the first in the table
    return "float32"


def loaded_dtype(context: Context, tensor: TensorInfo, dtype: str) -> str:
    """What `from_pretrained(dtype=...)` makes of a tensor: what the model keeps in float32 is widened, and only that."""
    kept = [context.tree.modules[name].keep_in_fp32 or "" for name in ancestors(tensor.name)]
    strict = any("_keep_in_fp32_modules_strict" in why for why in kept) and dtype in ("float16", "bfloat16")
    plain = any("_keep_in_fp32_modules" in why for why in kept) and dtype == "float16"
    return "float32" if strict or plain else dtype


def weights_of(context: Context, kinds: Collection[str]) -> dict[str, str]:
    """The weight that quantisers would take of every module of some classes: module name to canonical tensor name."""
    weights: dict[str, str] = {}
    for name, module in context.tree.modules.items():
        weight = module.tensors.get("weight")
        if weight is not None and weight.castable and context.is_kind(module, kinds):
            weights[name] = weight.name
    return weights


def weights_in(kinds: Collection[str]) -> Callable[[Context], frozenset[str]]:
    """What the patterns of such a quantiser can have an effect on: these weights, by canonical tensor names."""
    return lambda context: frozenset(weights_of(context, kinds).values())


def loading_note(base: str) -> str:
    """How the model must be loaded for the rest of the plan to come true."""
    return f"load the model in {base}: that is what everything not listed is planned in"


def wide_inputs_note(context: Context, tool: str, written: Collection[str] = ()) -> tuple[str, ...]:
    """What a tool's recipe does not have of a run whose activations are quantised, where there are such weights. written: the
    dtypes whose activations it has.
    """
    wide = {dtype for dtype in context.plan.dtypes.values() if dtypes.quantizes_activations(dtype)}
    if context.activations == "none" or not (left := wide.difference(written)):
        return ()
    of = f" of weights in {', '.join(map(dtypes.short_name, sorted(left)))}" if left != wide else ""
    return (
        f"activations{of} stay wide in this recipe for {tool}: only weights are written, and the recipe is for quantised ones",
    )


def as_comment(lines: Iterable[str]) -> str:
    """Lines of text as comments."""
    return "".join(f"# {line}\n" for line in lines)
