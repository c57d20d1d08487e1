"""Code shared by all targets. A target is a tool, such as torchao, to whose format a recipe can be converted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dtype_engine.core import dtypes
from dtype_engine.core.tree import Module, TensorInfo, Tree
from dtype_engine.recipe.loader_facts import loaded_dtype
from dtype_engine.recipe.plan import Plan
from dtype_engine.recipe.regexes import Anchored, compile_regex

Part = Literal["dtype", "scale"]


@dataclass(frozen=True, slots=True)
class Context:
    """A plan, the tree of its model, and the other facts about the model that converting a recipe needs."""

    tree: Tree
    plan: Plan
    title: str = "model"
    model_type: str | None = None
    """The `model_type` in config.json, such as "llama"."""
    kinds: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Maps each module class to its base classes' names. Many tools select modules by `isinstance`, which accepts subclasses."""
    activations: Literal["none", "weights"] = "none"
    """The run setting `quantize_activations` for which the recipe is meant."""

    def is_kind(self, module: Module, classes: Collection[str]) -> bool:
        """Return whether a module is an instance of one of these classes, given by name.

        An instance of a subclass counts if the base classes of its class are known.
        """
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
        """Return the tensors whose dtype the rules of a recipe can change."""
        return [tensor for tensor in self.tree.tensors.values() if tensor.castable]


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Tensors of a plan to which another tool, the target of the conversion, can't give their planned dtype or scales."""

    why: str
    part: Part
    """What differs from the plan. "dtype": the tensors get another dtype. "scale": they get the planned dtype, but the tool
    computes their scales by another rule.
    """
    planned: str
    instead: str
    """The dtype that the target gives the tensors instead of the planned dtype."""
    tensors: tuple[str, ...]
    """Canonical names of the tensors to which the target can't give their planned dtype."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A recipe that was converted to the format of another tool."""

    text: str
    """The content of the file that the other tool reads."""
    patterns: tuple[tuple[str, str], ...]
    """Pairs (pattern in the tool's syntax, dtype of the tensors that it matches)."""
    base: str | None
    """The dtype of all tensors that no pattern matches, or None if the tool has no default dtype."""
    left_out: tuple[Unsupported, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """The tensors that one pattern matches in another tool, the target of a conversion."""

    tensors: frozenset[str]
    """Canonical names of the tensors that the pattern matches."""
    problem: str | None = None
    """Why the pattern matches nothing, or None if the pattern matches something or the reason is unknown."""


@dataclass(frozen=True, slots=True)
class Target:
    """Another tool, such as torchao, to whose format this program can convert recipes."""

    name: str
    matcher: str
    """A phrase that says how the tool matches patterns, such as by `re.match` on module names."""
    precedence: Callable[[Sequence[str]], int] | None
    """A function that says which pattern the tool applies if several match a tensor: it takes these patterns, and returns the index
    of one. None if the tool has no order of precedence.
    """
    write: Callable[[Context], Conversion]
    """A function that converts the context's plan into the tool's format. Callers use `convert` instead, which also lists the
    formats of KV caches that `write` leaves out.
    """
    matchable: Callable[[Context], frozenset[str]]
    """A function that takes the context (plan and model) and returns the canonical names of all tensors that the tool's patterns
    can affect.
    """
    match: Callable[[Context, str], Match]
    """A function that takes the context (plan and model) and a pattern, and returns the tensors that the tool would match. It
    raises PatternError for an invalid regular expression.
    """
    writes_caches: bool = False
    """Whether `write` converts the plan's formats of KV caches, too. If False, they are left out."""

    def convert(self, context: Context) -> Conversion:
        """Return the context's plan in the format of the tool, with a list of what this format can't express."""
        written, losses = self.write(context), UnsupportedList()
        if not self.writes_caches:
            for name, form in context.plan.caches.items():
                losses.add(name, form, dtypes.STORED, "a recipe for this tool has no formats of KV caches")
        return replace(written, left_out=(*written.left_out, *losses.result()))


def matcher(source: str, pattern: str, kind: Anchored) -> Callable[[str], object]:
    """Compile a regular expression from another tool's recipe to a function that matches tensor names. Unlike in this program's own
    patterns, `.` does not match a line break.

    source: the regular expression. pattern: the text that the recipe has, such as `re:.*mlp`, for error messages. kind: how much of
    a name must match: all of it, its beginning, or any part. Raises PatternError.
    """
    return compile_regex(source, pattern, kind, dotall=False)


def first(patterns: Sequence[str]) -> int:
    """A `Target.precedence` for tools that apply the first matching pattern. patterns: the patterns that match one tensor. Returns
    the index of the one that the tool applies.
    """
    return 0


def last(patterns: Sequence[str]) -> int:
    """A `Target.precedence` for tools that apply the last matching pattern. patterns: the patterns that match one tensor. Returns
    the index of the one that the tool applies.
    """
    return len(patterns) - 1


def exact_first(patterns: Sequence[str]) -> int:
    """A `Target.precedence` for tools that apply an exact name before any regular expression, and otherwise the first matching
    pattern. patterns: the patterns that match one tensor. Returns the index of the one that the tool applies.
    """
    return next((index for index, pattern in enumerate(patterns) if not pattern.startswith("re:")), 0)


class UnsupportedList:
    """Collects the tensors to which a target can't give their planned dtype, and groups those with the same reason."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, Part, str, str], list[str]] = {}

    def add(self, tensor: str, planned: str, instead: str, why: str, part: Part = "dtype") -> None:
        self._found.setdefault((why, part, planned, instead), []).append(tensor)

    def result(self) -> tuple[Unsupported, ...]:
        return tuple(Unsupported(*reason, tuple(names)) for reason, names in self._found.items())


@dataclass(frozen=True, slots=True)
class Split:
    """What a quantization tool can do for a plan: which weights it quantizes as planned, and the one dtype in which it loads all
    other tensors.
    """

    low: Mapping[str, str]
    """The dtype to which each weight is to be quantized, by the weight's canonical name."""
    base: str
    """The dtype of all tensors that are not in `low`, which the tool does not quantize."""
    losses: UnsupportedList
    """The tensors to which the tool can't give their planned dtype, each with the dtype that it gets instead."""

    def by_dtype(self) -> dict[str, list[str]]:
        """Return the names of the weights to quantize, keyed by dtype. The names are in the model's order."""
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
    """Return what the tool named `tool` can do for the context's plan: the weights that it quantizes as planned, one dtype for all
    other tensors, and the tensors to which it can't give their planned dtype.

    formats: the dtypes to which the tool quantizes. kinds: the module classes whose `weight` it quantizes. by_transformers: whether
    transformers loads the model, which keeps modules in float32 if the model's code requires this. also: a further check, called
    with a module and a dtype. It returns why the tool can't quantize the module's weight to this dtype, or None.
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
        if by_transformers and tensor.persistent and instead != (kept := loaded_dtype(context.tree, tensor, base)):
            instead = kept
            if why is None and dtype != kept:
                why = "transformers keeps this module in float32 when it loads the model"
        if why is None and dtype != instead:
            why = (
                f"{tool} has one dtype for everything it does not quantize"
                if tensor.persistent
                else f"{tool} leaves non-persistent buffers as they are"
            )
        if why is not None:
            losses.add(tensor.name, dtype, instead, why)
    return Split(low, base, losses)


def _refusal(
    context: Context, tensor: TensorInfo, dtype: str, tool: str, formats: Collection[str], kinds: Collection[str]
) -> str | None:
    module = context.module_of(tensor.name)
    if tensor.kind != "parameter" or not tensor.name.endswith("weight") or tensor.name.rpartition(".")[2] != "weight":
        return f"{tool} quantizes the parameters named 'weight' only"
    if not context.is_kind(module, kinds):
        return f"{tool} quantizes {', '.join(sorted(kinds))} only"
    if len(tensor.shape) < 2:
        return f"{tool} quantizes matrices only"
    if tensor.aliases:
        return f"the weight is tied, and {tool} would untie it"
    if dtype not in formats:
        return f"{tool} has no {dtypes.short_name(dtype)}"
    blocks = dtypes.BY_NAME[dtype].blocks
    if blocks is not None and len(tensor.shape) > 2:
        return f"{tool} has blocks for matrices only"
    if blocks is not None and blocks.rows == 1 and dtypes.padded(tensor.shape, dtype):
        return f"{tool} needs rows of a multiple of {blocks.columns} values"
    return None


def _common_dtype(tensors: Sequence[TensorInfo], planned: Mapping[str, str]) -> str:
    """Return the compute dtype (such as bfloat16) that most elements of these tensors have under the plan. If none of them has a
    compute dtype under the plan, their stored dtypes decide. planned: dtypes by tensor name.
    """
    for dtype_by_name in (planned, {tensor.name: tensor.dtype for tensor in tensors}):
        elements = dict.fromkeys(dtypes.COMPUTE_DTYPES, 0)
        for tensor in tensors:
            if (dtype := dtype_by_name[tensor.name]) in elements:
                elements[dtype] += tensor.numel
        if any(elements.values()):
            return max(elements, key=elements.__getitem__)  # on a tie, the first in the table
    return "float32"


def weights_of(context: Context, kinds: Collection[str]) -> dict[str, str]:
    """Return the castable weights of all modules of certain classes, as a mapping from the module's name to the weight's name.
    kinds: names of the classes.
    """
    weights: dict[str, str] = {}
    for name, module in context.tree.modules.items():
        weight = module.tensors.get("weight")
        if weight is not None and weight.castable and context.is_kind(module, kinds):
            weights[name] = weight.name
    return weights


def weights_in(kinds: Collection[str]) -> Callable[[Context], frozenset[str]]:
    """Return a function for `Target.matchable` that returns the weights of all modules of the classes `kinds`. It is for tools that
    quantize only these weights.
    """
    return lambda context: frozenset(weights_of(context, kinds).values())


def loading_note(base: str) -> str:
    """Return a sentence that tells the user to load the model in the dtype `base`."""
    return f"load the model in {base}, the planned dtype of everything that is not listed"


def wide_inputs_note(context: Context, tool: str, written: Collection[str] = ()) -> tuple[str, ...]:
    """Return a note for the user if the recipe is for a run with quantized activations, but the file for `tool` leaves the
    activations of some weights unquantized. Otherwise, return ().

    written: the dtypes of weights whose activations the file does quantize.
    """
    wide = {dtype for dtype in context.plan.dtypes.values() if dtypes.quantizes_activations(dtype)}
    if context.activations == "none" or not (left := wide.difference(written)):
        return ()
    of = f" of weights in {', '.join(map(dtypes.short_name, sorted(left)))}" if left != wide else ""
    return (
        f"activations{of} stay wide in this file for {tool}, which quantizes only weights, but the recipe quantizes activations",
    )


def as_comment(lines: Iterable[str]) -> str:
    """Return lines of text as comment lines, which begin with `#`."""
    return "".join(f"# {line}\n" for line in lines)
