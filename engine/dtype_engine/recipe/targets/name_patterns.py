"""Finds few patterns that match exactly a given set of names among all names of a model.

Names are split at dots. Names that differ in only one component are merged repeatedly: the component gets a list of alternatives,
so a merged pattern matches no additional name. A list of numbers is replaced by "any number" if the pattern then still matches no
additional name.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Collection, Iterable

from dtype_engine.core.tree import is_number

Choice = frozenset[str] | None
"""The texts that a pattern allows for one component of a name. None allows any number."""
Product = tuple[Choice, ...]
"""A pattern: one `Choice` for each component of a name."""


def products(wanted: Iterable[str], universe: Collection[str]) -> list[Product]:
    """Return patterns that together match all names in `wanted` and no other name in `universe`."""
    names = list(dict.fromkeys(wanted))
    covered: list[Product] = [tuple(frozenset((part,)) for part in name.split(".")) for name in names]
    longest = max(map(len, covered), default=0)
    # Numbers are merged first, because patterns read best if layers are merged before projections.
    for numbers in (True, False):
        for index in reversed(range(longest)):
            covered = _merged(covered, index, numbers)
    others: dict[int, list[list[str]]] = {}
    chosen = set(names)
    for name in universe:
        if name not in chosen:
            parts = name.split(".")
            others.setdefault(len(parts), []).append(parts)
    return [_widened(product, others.get(len(product), [])) for product in covered]


def _merged(unmerged: list[Product], index: int, numbers: bool) -> list[Product]:
    """Merge patterns that differ only in component `index`. numbers: True to merge components that are numbers, False for words."""
    groups: dict[object, set[str]] = {}
    whole: dict[object, Product] = {}
    for product in unmerged:
        choice = product[index] if index < len(product) else None
        if choice is None or all(is_number(text) for text in choice) is not numbers:
            key: object = product
        else:
            key = (index, product[:index], product[index + 1 :])
            groups.setdefault(key, set()).update(choice)
        whole.setdefault(key, product)
    return [
        (*product[:index], frozenset(groups[key]), *product[index + 1 :]) if key in groups else product
        for key, product in whole.items()
    ]


def _widened(product: Product, others: list[list[str]]) -> Product:
    """Return `product` with each list of several numbers replaced by "any number". A list stays if the pattern would otherwise
    match a name in `others`. others: names, each split at dots.
    """
    for index, choice in enumerate(product):
        if choice is not None and len(choice) > 1 and all(is_number(text) for text in choice):
            wider = (*product[:index], None, *product[index + 1 :])
            if not any(_covers(wider, parts) for parts in others):
                product = wider
    return product


def _covers(product: Product, parts: list[str]) -> bool:
    return all(
        is_number(part) if choice is None else part in choice for choice, part in zip(product, parts, strict=True)
    )


def regexes(wanted: Iterable[str], universe: Collection[str]) -> list[str]:
    """Return regular expressions that fully match all of `wanted` and no other name in `universe`. The caller adds anchors."""
    return [r"\.".join(map(_as_regex, product)) for product in products(wanted, universe)]


def _as_regex(choice: Choice) -> str:
    if choice is None:
        return "[0-9]+"
    texts = [re.escape(text) for text in _sorted(choice)]
    return texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"


def _sorted(choice: frozenset[str]) -> list[str]:
    return sorted(choice, key=lambda text: (int(text) if is_number(text) else -1, text))


def globs(wanted: Iterable[str], universe: Collection[str]) -> list[str]:
    """Return `fnmatch` patterns that match all of `wanted` and no other name in `universe`. Numbers become `*` if possible."""
    names = list(dict.fromkeys(wanted))
    patterns: list[str] = []
    for product in products(names, universe):
        mine = {name for name in names if name.count(".") + 1 == len(product) and _covers(product, name.split("."))}
        for choices in itertools.product(*map(_as_globs, product)):
            pattern = ".".join(choices)
            matches = re.compile(fnmatch.translate(pattern)).match
            if None in product and any(matches(name) for name in universe if name not in mine):
                patterns += [_literal(name) for name in names if name in mine and matches(name)]
            else:
                patterns.append(pattern)
    return patterns


def _as_globs(choice: Choice) -> list[str]:
    if choice is None:
        return ["*"]
    texts = _sorted(choice)
    if len(texts) > 1 and all(len(text) == 1 and is_number(text) for text in texts):
        return [f"[{''.join(texts)}]"]
    return [_literal(text) for text in texts]


def _literal(text: str) -> str:
    return re.sub(r"[*?\[]", lambda special: f"[{special[0]}]", text)
