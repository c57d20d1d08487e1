"""Finds a short, readable recipe that gives every weight its wanted dtype.

Rules are chosen greedily. Their patterns are whole kinds of modules (`*.mlp.down_proj`), ranges of numbered layers
(`model.layers.{3..9}.mlp`), classes, and single names. Each step adds the rule with the largest number of corrected weights minus
newly wrong weights. Each pattern is matched against the tree itself, so the resulting plan is exact for any names.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from dtype_engine.core import dtypes
from dtype_engine.core.kv_cache import KV_CACHE, STATES
from dtype_engine.core.kv_formats import KV_FORMATS
from dtype_engine.core.tree import Tree, ancestors, is_number, numbered_parts
from dtype_engine.recipe.pattern import generalisations
from dtype_engine.recipe.plan import dtype_given, make_plan, select
from dtype_engine.recipe.rules import Recipe, Rule

_MOST_KINDS = 4


def minimize(tree: Tree, wanted: Mapping[str, str], after: Recipe | None = None) -> Recipe:
    """Return a short recipe under which the tensors in `wanted` get these dtypes and all others stay as stored. The keys of
    `wanted` are canonical names of tensors, and names of KV cache tensors. A tensor that can't have a type of llama.cpp gets what
    replaces it. after: a recipe to which the result will be appended. Tensors that are not in `wanted` then keep the dtypes that
    `after` gives them.
    """
    after = after or Recipe()
    now = dict(make_plan(tree, after).dtypes)
    target = now | {
        name: dtype_given(tree.tensors[name], dtype) for name, dtype in wanted.items() if name in tree.tensors
    }
    recipe = _pruned(tree, _Proposals(tree, target).rules(now), target, after)
    assert dict(make_plan(tree, after.then(*recipe.rules)).dtypes) == target
    caches = {name: form for name, form in wanted.items() if name not in tree.tensors}
    if not caches:
        return recipe
    rules: list[Rule] = []
    # States come last, since a rule for keys and values, such as `*.kv_cache=bf16`, may reach them as well.
    for tensors in (tree.kv_cache.of_tokens, tree.kv_cache.states):
        names = [tensor.name for tensor in tensors]
        given = make_plan(tree, Recipe.of(rules)).caches
        now = {name: given.get(name, dtypes.STORED) for name in names}
        rules += _CacheProposals(tree, {name: caches.get(name, dtypes.STORED) for name in names}).rules(now)
    return recipe.then(*rules)


def _pruned(tree: Tree, rules: list[Rule], target: Mapping[str, str], after: Recipe) -> Recipe:
    """Return those `rules` that are needed, as a recipe. Appended to `after`, it still gives all tensors the dtypes in `target`."""
    index = 0
    while index < len(rules):
        fewer = Recipe((*rules[:index], *rules[index + 1 :]))
        if dict(make_plan(tree, after.then(*fewer.rules)).dtypes) == target:
            rules = list(fewer.rules)
        else:
            index += 1
    return Recipe(tuple(rules))


class _Proposals:
    """Proposes rules for a recipe. target: the wanted dtype of every tensor, by name."""

    def __init__(self, tree: Tree, target: Mapping[str, str]) -> None:
        self.tree = tree
        self.target = target
        self._selected: dict[str, tuple[str, ...]] = {}
        self._patterns = self._general_patterns()

    def rules(self, now: Mapping[str, str]) -> list[Rule]:
        """Return rules that give all tensors their wanted dtypes. now: their dtypes without these rules."""
        reached, rules = dict(now), list[Rule]()
        while wrong := {name for name, dtype in self.target.items() if reached[name] != dtype}:
            rule, taken = self.best(reached, wrong)
            rules.append(rule)
            for name in taken:
                tensor = self.tree.tensors.get(name)
                reached[name] = rule.dtype if tensor is None else dtype_given(tensor, rule.dtype)
        return rules

    def best(self, now: Mapping[str, str], wrong: set[str]) -> tuple[Rule, tuple[str, ...]]:
        """Return (the best rule, the tensors that it selects). The best rule has the largest number of corrected tensors minus
        newly wrong ones and, if several rules have it, the shortest pattern. now: the dtype of each tensor so far. wrong: the
        tensors whose dtype is not the wanted one.
        """
        best: tuple[float, int, str, str] | None = None
        for pattern in (*self._patterns, *self._ranges(wrong)):
            taken = self.taken(pattern)
            votes = Counter(self.target[name] for name in taken if name in wrong)
            for dtype, mended in votes.items():
                broken = sum(now[name] == self.target[name] != dtype for name in taken)
                # A choice or range makes a pattern longer, so it must correct more weights to be worth it.
                gain = mended - broken - 0.2 * (pattern.count(",") + pattern.count(".."))
                entry = (-gain, len(pattern), pattern, dtype)
                if mended > broken and (best is None or entry < best):
                    best = entry
        name = min(wrong)
        pattern, dtype = best[2:] if best is not None else (generalisations(name)[0], self.target[name])
        if dtype not in (*dtypes.CASTABLE_DTYPES, *KV_FORMATS):
            dtype = dtypes.STORED  # nothing can be cast to such a dtype: the tensors are stored in it
        return Rule.make(pattern, dtype), self.taken(pattern)

    def taken(self, pattern: str) -> tuple[str, ...]:
        if pattern not in self._selected:
            self._selected[pattern] = self._select(pattern)
        return self._selected[pattern]

    def _select(self, pattern: str) -> tuple[str, ...]:
        return select(self.tree, pattern).tensors

    def _general_patterns(self) -> list[str]:
        """Return the patterns that are tried in every step: `*`, classes, and names with wildcards."""
        patterns = dict.fromkeys("*")
        for name, module in self.tree.modules.items():
            if name:
                patterns |= dict.fromkeys(generalisations(name, module.class_name)[1:])
        for name in self.target:
            patterns |= dict.fromkeys(generalisations(name)[1:])
        return list(patterns)

    def _ranges(self, wrong: Iterable[str]) -> list[str]:
        """Return patterns for single names, and for ranges of layers. A range covers layers in which, for example, `mlp.down_proj`
        needs the same dtype. wrong: the tensors whose dtype is not the wanted one.
        """
        literal: dict[str, None] = {}
        kinds = {kind for name in wrong for kind in _kinds(name)}
        for name in wrong:
            literal |= dict.fromkeys([generalisations(name)[0], *self._uniform_modules_above(name)])
        patterns: dict[str, None] = {}
        by_set: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
        for (before, after), by_layer in self._layers.items():
            if (before, after) not in kinds:
                continue
            for dtype in {dtype for dtype_set in by_layer.values() for dtype in dtype_set}:
                numbers = tuple(sorted(number for number, dtype_set in by_layer.items() if dtype_set == {dtype}))
                if numbers:
                    by_set.setdefault((before, dtype, numbers), []).append(after)
        for (before, _, numbers), afters in by_set.items():
            chosen = numbers_pattern(numbers)
            for after in afters:
                patterns[f"{before}.{chosen}{after}"] = None
            tops = [
                after
                for after in afters
                if not any(after.startswith(f"{other}.") or not other for other in afters if other != after)
            ]
            if 1 < len(tops) <= _MOST_KINDS:
                patterns[f"{before}.{chosen}.{_choices(sorted(top[1:] for top in tops))}"] = None
        return [*patterns, *literal]

    @functools.cached_property
    def _layers(self) -> dict[tuple[str, str], dict[int, set[str]]]:
        """The dtypes that are wanted in each layer of each kind of `_kinds`."""
        layers: dict[tuple[str, str], dict[int, set[str]]] = {}
        for name in (*self._modules(), *self.target):
            wants = {self.target[tensor] for tensor in self._below(name)}
            for kind, number in _kinds(name).items():
                layers.setdefault(kind, {}).setdefault(number, set()).update(wants)
        return layers

    def _modules(self) -> list[str]:
        return [name for name in self.tree.modules if name]

    def _below(self, name: str) -> list[str]:
        tensor = self.tree.canonical(name)
        if tensor is not None and name not in self.tree.modules:
            return [tensor.name] if tensor.castable and tensor.persistent else []
        return [each.name for each in self.tree.below(name) if each.castable and each.persistent]

    def _uniform_modules_above(self, name: str) -> list[str]:
        return [
            generalisations(module)[0]
            for module in ancestors(name)
            if module and len({self.target[tensor] for tensor in self._below(module)}) == 1
        ]


class _CacheProposals(_Proposals):
    """Proposes rules for KV caches. target: the wanted format of all keys and values, or of all recurrent states, by name."""

    def _select(self, pattern: str) -> tuple[str, ...]:
        caches = select(self.tree, pattern).caches
        taken = tuple(name for name in caches if name in self.target)
        # A pattern for states that also names keys or values would change what is right already.
        of_states = bool(taken) and taken[0].rpartition(".")[2] in STATES
        return () if of_states and len(taken) < len(caches) else taken

    def _general_patterns(self) -> list[str]:
        names = [*self._modules(), *self.target]
        return list(
            dict.fromkeys(pattern for name in names for pattern in generalisations(name)[1:] if KV_CACHE in pattern)
        )

    def _modules(self) -> list[str]:
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self.target))

    def _below(self, name: str) -> list[str]:
        return [
            each for each in self.target if each == name or (each.startswith(f"{name}.") and name.endswith(KV_CACHE))
        ]


def _kinds(name: str) -> dict[tuple[str, str], int]:
    """Return the numbers in a dotted name and in the names of its enclosing modules, keyed by (text before the number, text after
    it). Further numbers in the text after it become `*`. If names have a key in common, one pattern with a range can match them.

    For `layers.3.experts.5.w1`, 3 has the key ("layers", ".experts.*.w1"), and 5 has the key ("layers.3.experts", ".w1").
    """
    numbers: dict[tuple[str, str], int] = {}
    for whole in (name, *ancestors(name)):
        parts = whole.split(".")
        for index in numbered_parts(whole):
            if index and str(int(parts[index])) == parts[index]:
                before = ".".join(parts[:index])
                rest = "".join("." + ("*" if is_number(other) else other) for other in parts[index + 1 :])
                if not any(character in before + rest.replace("*", "") for character in "*?[]{},"):
                    numbers[before, rest] = int(parts[index])
    return numbers


def numbers_pattern(numbers: Sequence[int]) -> str:
    """Return a part of a pattern that matches these numbers, in ascending order, and no others: `{0,4..7}`."""
    texts: list[str] = []
    for _, entries in groupby(enumerate(numbers), key=lambda entry: entry[1] - entry[0]):
        run = [number for _, number in entries]
        texts += [f"{{{run[0]}..{run[-1]}}}"] if len(run) > 2 else map(str, run)
    return texts[0] if len(texts) == 1 else f"{{{','.join(texts)}}}"


def _choices(names: list[str]) -> str:
    parts = [name.split(".") for name in names]
    common = 0
    while all(len(part) > common + 1 and part[: common + 1] == parts[0][: common + 1] for part in parts):
        common += 1
    front = "".join(f"{part}." for part in parts[0][:common])
    return front + "{" + ",".join(".".join(part[common:]) for part in parts) + "}"
