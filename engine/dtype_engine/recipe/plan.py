"""Applies a recipe to a tree. The result is a plan: the dtype of every tensor, the rule that decided it, and the bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from weakref import WeakKeyDictionary

import msgspec

from dtype_engine.core import dtypes
from dtype_engine.core.errors import TooSlow, UserError
from dtype_engine.core.kv_formats import (
    KV_FORMATS,
    ONLY_KV,
    STOCHASTIC,
    may_have,
    may_name_caches,
    names_caches,
    why_no_state,
)
from dtype_engine.core.llama_types import fitted, llama_type
from dtype_engine.core.regexes import shortened, time_limit
from dtype_engine.core.suggest import nearest
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Module, TensorInfo, Tree
from dtype_engine.core.units import human_bytes, plural
from dtype_engine.recipe.pattern import Pattern, compile_pattern, generalisations
from dtype_engine.recipe.rules import Recipe, Rule

MATCHING_S = 5.0
"""Time limit in seconds for matching one pattern, or all patterns of a recipe together, against the names of a model."""


class Selection(msgspec.Struct, frozen=True):
    """The modules, tensors and KV caches that a pattern selects in a tree."""

    modules: frozenset[str]
    """The names of the modules that the pattern matches. A module inside another matched module is left out."""
    tensors: tuple[str, ...]
    """The canonical names of the selected tensors that can be cast."""
    uncastable: tuple[str, ...] = ()
    """Names of selected tensors that are never cast, such as integers, and of non-persistent buffers that are not named exactly."""
    caches: tuple[str, ...] = ()
    """The names of the selected KV cache tensors. Only patterns that name caches, such as `*.kv_cache`, select any."""
    unfit: str | None = None
    """For the user: which of the KV caches that the pattern names can't have the rule's format, and why. None are then selected."""

    def __len__(self) -> int:
        return len(self.tensors) + len(self.caches)

    def for_dtype(self, tree: Tree, dtype: str) -> Selection:
        """Return what a rule with this pattern and `dtype` selects in the same tree. Weights are left out if they can't have the
        dtype, and so are KV caches.
        """
        given = self.with_caches(dtype)
        if dtype not in ONLY_KV:
            return given
        unfit = unfit_caches(tree, given.caches, dtype)
        return msgspec.structs.replace(
            given, tensors=(), uncastable=(), caches=() if unfit else given.caches, unfit=unfit
        )

    def with_caches(self, form: str) -> Selection:
        """Return this selection without the KV cache tensors that can't have the format `form`, whatever their shape."""
        caches = tuple(name for name in self.caches if may_have(name.rpartition(".")[2], form))
        return self if len(caches) == len(self.caches) else msgspec.structs.replace(self, caches=caches)


def unfit_caches(tree: Tree, caches: Collection[str], form: str) -> str | None:
    """Return which of the KV cache tensors named in `caches` can't have a format of `KV_FORMATS`, and why, for the user, or None if
    all can.
    """
    among, row = frozenset(caches), KV_FORMATS[form]
    reasons = ((tensor.name, row.why_not(tensor)) for tensor in tree.kv_cache.tensors if tensor.name in among)
    return next((f"{printable(name)} can't be {form}: {why}" for name, why in reasons if why is not None), None)


def select(tree: Tree, pattern: str, seconds: float = MATCHING_S) -> Selection:
    """Return the selection of a pattern. Raises PatternError if it is invalid, and TooSlow if matching takes over `seconds`."""
    with time_limit(seconds):
        return _selected(tree, compile_pattern(pattern))


def _selected(tree: Tree, compiled: Pattern) -> Selection:
    modules: set[str] = set()
    taken: dict[str, None] = {}
    uncastable: dict[str, None] = {}
    stack: list[Module] = [tree.root]
    while stack:
        node = stack.pop()
        if compiled.matches_class(node.class_name) or (node.name != "" and compiled.matches(node.name)):
            # A matched module selects everything below it, whatever the names are.
            modules.add(node.name)
            for tensor in tree.below(node.name):
                is_cast = tensor.castable and (tensor.persistent or any(map(compiled.matches_exactly, tensor.names)))
                (taken if is_cast else uncastable)[tensor.name] = None
            continue
        prefix = f"{node.name}." if node.name else ""
        for local, tensor in node.tensors.items():
            name = prefix + local
            if compiled.matches(name):
                is_cast = tensor.castable and (tensor.persistent or compiled.matches_exactly(name))
                (taken if is_cast else uncastable)[tensor.name] = None
        stack.extend(reversed(node.children.values()))
    for tensor in tree.renamed:
        if tensor.name not in taken and all(map(compiled.selects, tensor.stored_as)):
            (taken if tensor.castable else uncastable)[tensor.name] = None
    named = tree.caches if may_name_caches(compiled.text) else ()
    caches = tuple(name for name in named if _names_cache(compiled, name))
    return Selection(frozenset(modules), tuple(taken), tuple(name for name in uncastable if name not in taken), caches)


def _names_cache(compiled: Pattern, name: str) -> bool:
    """Return whether a pattern names this KV cache tensor specifically, as `*.kv_cache.k` does, but not `*.self_attn`."""
    return (names_caches(compiled.text) and compiled.selects(name)) or compiled.matches_exactly(name)


class RuleEffect(msgspec.Struct, frozen=True):
    """The effect of one rule in a plan."""

    index: int
    rule: Rule
    tensors: tuple[TensorInfo, ...]
    decides: int
    """How many of `tensors` and `caches` get the rule's dtype. A later rule decides the dtype of the others."""
    caches: tuple[str, ...] = ()
    """The names of the KV cache tensors that the rule selects."""

    @property
    def matches(self) -> int:
        """How many tensors the rule selects, including KV cache tensors."""
        return len(self.tensors) + len(self.caches)

    @property
    def bytes_before(self) -> int:
        """Bytes of `tensors` as stored."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bytes_after(self) -> int:
        """Bytes of `tensors` in the rule's dtype."""
        return sum(tensor_bytes(tensor, self.rule.dtype) for tensor in self.tensors)


class Plan(msgspec.Struct, frozen=True):
    """The dtype of every tensor under a recipe, as `make_plan` computes it before anything is cast."""

    recipe: Recipe
    dtypes: Mapping[str, str]
    """The planned dtype of every tensor, by canonical name."""
    decided_by: Mapping[str, int]
    """The index of the rule that decides the dtype of a tensor or the format of a KV cache tensor, by name, if a rule does."""
    selections: tuple[Selection, ...]
    """The selection of each rule, in the recipe's order."""
    stored_bytes: int
    planned_bytes: int
    pending_classes: tuple[int, ...] = ()
    """Indices of the rules that select modules by class. They select nothing yet, because the model's classes are still unknown."""
    caches: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The formats that rules give to KV cache tensors, by name. Other KV caches keep the dtype that the model's code gives them."""
    too_slow: tuple[int, ...] = ()
    """Indices of the rules whose patterns take too long to match. They select nothing in the plan."""

    def __repr__(self) -> str:
        rules = plural(len(self.recipe), "rule")
        return (
            f"Plan: {len(self.decided_by):,} of {plural(len(self.dtypes), 'tensor')} decided by {rules}\n"
            f"  rules   {printable(str(self.recipe), 300)}\n"
            f"  memory  stored {human_bytes(self.stored_bytes)} → planned {human_bytes(self.planned_bytes)}"
        )

    def same_casts(self, other: Plan) -> bool:
        """Return whether another plan for the same tree gives all tensors the same dtypes, and all KV caches the same formats."""
        return self.dtypes == other.dtypes and self.caches == other.caches

    def effects(self, tree: Tree, among: Collection[str] | None = None) -> Iterator[RuleEffect]:
        """Yield the effect of each rule, in the recipe's order, on all tensors or on those named in `among`."""
        for index, (rule, selection) in enumerate(zip(self.recipe.rules, self.selections, strict=True)):
            taken = tuple(tree.tensors[name] for name in selection.tensors if among is None or name in among)
            caches = tuple(name for name in selection.caches if among is None or name in among)
            decided = sum(self.decided_by[name] == index for name in (*(tensor.name for tensor in taken), *caches))
            yield RuleEffect(index, rule, taken, decided, caches)

    @property
    def unmatched(self) -> list[int]:
        """Indices of the rules that select nothing, except those in `pending_classes` and `too_slow`."""
        unknown = {*self.pending_classes, *self.too_slow}
        return [index for index, taken in enumerate(self.selections) if not taken and index not in unknown]

    def refuse_too_slow(self) -> None:
        """Raise TooSlow if a rule takes too long to match, because the tensors that it selects are then unknown."""
        for index in self.too_slow:
            raise TooSlow(
                f"pattern {shortened(self.recipe.rules[index].pattern)} takes too long to match (the patterns of a recipe "
                f"have {MATCHING_S:g} s together): simplify it, especially repeats inside repeats"
            )


_latest: WeakKeyDictionary[Tree, Plan] = WeakKeyDictionary()
"""The last plan of each tree, because the same plan is often needed twice, such as while the user types a rule and when the rule is
applied. With 90,000 tensors, a plan takes 0.1 s, which would delay a key press.
"""


def make_plan(tree: Tree, recipe: Recipe) -> Plan:
    """Return the plan of a recipe for a tree. The last rule that selects a tensor decides its dtype."""
    known = _latest.get(tree)
    if known is not None and known.recipe == recipe:
        return known
    planned = {name: tensor.dtype for name, tensor in tree.tensors.items()}
    decided: dict[str, int] = {}
    caches: dict[str, str] = {}
    selections: list[Selection] = []
    pending_classes: list[int] = []
    too_slow: list[int] = []
    with time_limit(MATCHING_S):
        for index, rule in enumerate(recipe.rules):
            try:
                pattern = compile_pattern(rule.pattern)
                taken = _selected(tree, pattern).for_dtype(tree, rule.dtype)
            except TooSlow:
                selections.append(Selection(frozenset(), ()))
                too_slow.append(index)
                continue
            if pattern.by_class and not tree.has_classes:
                pending_classes.append(index)
            selections.append(taken)
            same = rule.dtype != dtypes.STORED and llama_type(rule.dtype) is None
            for name in taken.tensors:
                planned[name] = rule.dtype if same else dtype_given(tree.tensors[name], rule.dtype)
                decided[name] = index
            for name in taken.caches:
                caches[name] = rule.dtype
                decided[name] = index
    changed = sum(
        tensor.nbytes_in(planned[name]) - tensor.nbytes
        for name, tensor in tree.tensors.items()
        if planned[name] != tensor.dtype and tensor.counted
    )
    plan = Plan(
        recipe,
        planned,
        decided,
        tuple(selections),
        tree.stored_bytes,
        tree.stored_bytes + changed,
        tuple(pending_classes),
        {name: form for name, form in caches.items() if form != dtypes.STORED},
        tuple(too_slow),
    )
    if not too_slow:  # a later attempt, on a less busy machine, may finish in time
        _latest[tree] = plan
    return plan


def dtype_given(tensor: TensorInfo, dtype: str) -> str:
    """Return the dtype that a rule with `dtype` gives a tensor. It is another one only for `dtypes.STORED`, and for a type of
    llama.cpp that the tensor can't have.
    """
    return tensor.dtype if dtype == dtypes.STORED else fitted(dtype, tensor.shape, tensor.name)


def tensor_bytes(tensor: TensorInfo, dtype: str) -> int:
    """Return a tensor's bytes under a rule with `dtype`, which may be `dtypes.STORED`."""
    return tensor.nbytes_in(dtype_given(tensor, dtype))


def llama_notices(tree: Tree, plan: Plan) -> tuple[str, ...]:
    """Return notices about the tensors to which a rule with a type of llama.cpp gives another dtype, one for each pair of both, and
    about weights that llama.cpp rounds otherwise.
    """
    found: dict[tuple[str, str], list[TensorInfo]] = {}
    for name, index in plan.decided_by.items():
        wanted = plan.recipe.rules[index].dtype
        if llama_type(wanted) is not None and name in tree.tensors and plan.dtypes[name] != wanted:
            found.setdefault((wanted, plan.dtypes[name]), []).append(tree.tensors[name])
    notices = []
    for (wanted, given), tensors in found.items():
        first, row = printable(tensors[0].name), llama_type(wanted)
        why = "llama-quantize keeps vectors, norms and routers in float32"
        if row is not None and given != "float32":
            why = f"{row.name} needs rows of a multiple of {row.block} values"
            first += f" with {tensors[0].shape[-1]}"
        notices.append(f"{plural(len(tensors), 'tensor')} in {given}, not {wanted}: {why} (first {first})")
    turned = [
        name
        for name in plan.decided_by
        if llama_type(plan.dtypes.get(name, "")) is not None
        and (module := tree.modules.get(name.rpartition(".")[0])) is not None
        and module.class_name == "Conv1D"
    ]
    if turned:
        notices.append(
            f"blocks lie along the outputs of {plural(len(turned), 'weight')} of Conv1D, which has inputs first; in a GGUF file "
            f"they lie along the inputs, so values differ (first {printable(turned[0])})"
        )
    return tuple(notices)


def rules_in_doubt(tree: Tree, recipe: Recipe) -> bool:
    """Return whether some rules match nothing in this tree, but may match something once the model's architecture is known. A tree
    that was built from the files alone lacks module classes and the aliases of tied weights. Raises TooSlow.
    """
    plan = make_plan(tree, recipe)
    plan.refuse_too_slow()
    return bool(plan.unmatched or plan.pending_classes)


def require_matches(tree: Tree, recipe: Recipe) -> Plan:
    """Return the plan of a recipe for a tree. Raises UserError if a rule selects nothing, or if it selects by module class in a
    tree without classes. The error says why, and suggests a similar name.
    """
    plan = make_plan(tree, recipe)
    plan.refuse_too_slow()
    if plan.pending_classes:
        raise UserError(explain_no_match(tree, recipe.rules[plan.pending_classes[0]].pattern))
    if unmatched := plan.unmatched:
        index = unmatched[0]
        others = [repr(recipe.rules[other].pattern) for other in unmatched[1:]]
        nor = "nor does 1 more rule" if len(others) == 1 else f"nor do {len(others)} more rules"
        more = f"; {nor} match anything: {', '.join(others[:5])}" if others else ""
        rule = recipe.rules[index]
        raise UserError(explain_no_match(tree, rule.pattern, plan.selections[index], rule.dtype) + more)
    return plan


def uncast_words(tree: Tree, taken: Selection) -> str:
    """Return words for the user that name the first of the tensors in `taken` that can't be cast, and say why."""
    first = taken.uncastable[0]
    return f"first {printable(first)}: {tree.tensors[first].why_not_cast}"


_MOST_NAMES = 20_000
"""Maximum number of names with which a mistyped pattern is compared. Comparing this many takes a second."""
NO_CLASSES = (
    "but this model's architecture is unknown: put a config.json that names a known one next to its files, or open the model's own "
    "code with file.py:Name --weights FILE"
)


def explain_no_match(tree: Tree, pattern: str, taken: Selection | None = None, dtype: str | None = None) -> str:
    """Return a sentence that says why a pattern, or a rule with the pattern and `dtype`, selects nothing in the tree. taken: what
    it selects, if that is known.
    """
    named = f"pattern {shortened(pattern)}"
    if taken is not None and taken.unfit is not None:
        return f"{named}: {taken.unfit}"
    if names_caches(pattern) and not tree.caches:
        return f"{named} names KV caches: {tree.kv_cache.none_because or 'this model has none that a rule can give a format'}"
    if taken is not None and taken.uncastable:
        return f"{named} matches only tensors that it does not cast ({uncast_words(tree, taken)})"
    compiled = compile_pattern(pattern)
    if compiled.by_class and not tree.has_classes:
        return f"{named} matches module classes, {NO_CLASSES}"
    with time_limit(MATCHING_S):
        of_caches = _no_format(tree, compiled, dtype)
        partly = next((tensor for tensor in tree.renamed if any(map(compiled.selects, tensor.stored_as))), None)
    if of_caches is not None:
        return f"{named} matches only {of_caches}"
    if partly is not None:
        return (
            f"{named} matches only a part of {partly.name}, which the model packs from {len(partly.stored_as)} tensors of the "
            "files: match all of them, or the packed tensor"
        )
    import regex  # the import takes 10 ms

    ranged = regex.sub(r"\{(\d+)-(\d+)\}", r"{\1..\2}", pattern)
    if ranged != pattern and select(tree, ranged).tensors:
        return f"{named} matches nothing in this model; a range is written with two dots: {ranged}"
    if compiled.by_class:
        known = sorted({module.class_name for module in tree.modules.values() if module.class_name})
        wanted, prefix = pattern.removeprefix("type:"), "type:"
    else:
        names = tree.caches if names_caches(pattern) else (*tree.modules, *tree.tensors)
        known, wanted, prefix = list(names[:_MOST_NAMES]), pattern, ""
        if "*" in pattern:  # compared with the patterns that select something
            known = list({step for name in known for step in generalisations(name) if "*" in step or "." not in step})
    near = nearest(wanted, known[:_MOST_NAMES])
    hint = f"; the nearest is {prefix}{near}" if near else ""
    return f"{named} matches nothing in this model{hint}"


def _no_format(tree: Tree, compiled: Pattern, dtype: str | None) -> str | None:
    """Return what a pattern matches of KV caches that can't have a format, or not the format `dtype`, and why. None if it matches
    no KV cache, or one that can.
    """
    caches = tree.kv_cache.tensors if may_name_caches(compiled.text) else ()
    taken = [tensor for tensor in caches if _names_cache(compiled, tensor.name)]
    if not taken:
        return None
    if taken[0].why_no_format is not None:
        first = f"{printable(taken[0].name)}: {taken[0].why_no_format}"
        return f"KV caches that take no format (first {first})"
    if dtype is None or any(may_have(tensor.part, dtype) for tensor in taken):
        return None
    states = sum(tensor.is_state for tensor in taken)
    if not states:
        only = "; only states of recurrences can" if dtype == STOCHASTIC else ""
        return f"keys and values, which can't be {dtypes.short_name(dtype)}{only}"
    return f"{plural(states, 'recurrent state')}: {why_no_state(dtype)}"
