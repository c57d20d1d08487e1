"""Changes at random to what a file holds, as whoever wants to do harm might make them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

STRANGE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 10**400, 1.5, -0.0, float("inf"), "", "a", "\x1b[2J", "\u202e",
    "x" * 3000, [], [0], [[[]]], {}, {"a": 1}, [2**62, 2**62], [0, 2**63], "../../etc/passwd", "/dev/zero", "a\x00b", "\udcff",
    "~nobody/x", "re:(.*)*(.*)*[YZ]", "re:((((", "{0..99999999999999999}", "type:*", "{a,{b,{c,d}}}", "9999-99-99", "demo",
    "evil.py:Net", "\ufeff", "F32", "BF16", "bf16", ".", "..", "a" * 300 + ".py:Net",
)  # fmt: skip


def changed(value: Any, chooser: random.Random) -> Any:
    """A copy of a JSON value with one part of it replaced, dropped, doubled, renamed or nested."""
    if isinstance(value, dict) and value and chooser.random() < 0.9:
        made = dict(value)
        key = chooser.choice(list(made))
        what = chooser.random()
        if what < 0.08:
            del made[key]
        elif what < 0.2:
            made[str(chooser.choice(STRANGE))] = made[key]
        else:
            made[key] = changed(made[key], chooser)
        return made
    if isinstance(value, list) and value and chooser.random() < 0.8:
        copied = list(value)
        index = chooser.randrange(len(copied))
        copied[index] = changed(copied[index], chooser)
        return copied * chooser.choice((1, 1, 1, 1, 50)) if chooser.random() < 0.1 else copied
    if chooser.random() < 0.05:
        nested = value
        for _ in range(chooser.choice((5, 60, 600))):
            nested = [nested]
        return nested
    return chooser.choice(STRANGE)


def places(value: Any, at: tuple[str | int, ...] = (), lists: bool = False) -> Iterator[tuple[str | int, ...]]:
    """The keys and indexes that lead to each number in a JSON value and, with `lists`, to each list."""
    if (lists and isinstance(value, list)) or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        yield at
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*at, key), lists)


def replaced_at(value: Any, place: tuple[str | int, ...], new: Any) -> Any:
    """A copy of a JSON value with `new` at one of its `places`."""
    made = copy.deepcopy(value)
    holder = made
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = new
    return made
