"""Events whose types are right and nothing else, as an engine may send them that is at fault or means harm."""

from __future__ import annotations

import dataclasses
import random
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from dtype_engine.core.tree import Tree
from dtype_engine.recipe import Recipe
from dtype_engine.results.drift import NAMES
from dtype_engine.results.pictures import Picture
from dtype_engine.service import events
from dtype_engine.service.commands import OWN_NAMES
from dtype_engine.service.jobs import JOBS
from dtype_engine.service.message import Message
from dtype_engine.service.messages import job_types

INTS = (-1, -1, 0, 0, 1, 2, -(2**31), 2**31, 2**53 + 1, 2**60, -(2**60), 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "", " ", ".", "a..b", "x" * 5000, "\x1b[2J\x1b]0;owned\x07", "a\nb\n\nc", "\r\t\0\x9b2J", "[red]", "[/]", "[link=x]y[/link]",
    "\u202etxt", "漢字" * 40, "e\u0301" * 60, "👩\u200d👩\u200d👧", "*", "type:", "re:(", "{1..9}", "int8@tensor", "bfloat16",
    "as stored", "*=bf16", "=", "nope=f7", "model.layers.0.mlp=float16", "defaults", "reference", "scan",
)  # fmt: skip
HOSTILE = (
    "\x1b]0;owned\x07", "\x1b[2J", "\x9b31m", "a\x1b[H.b\x1b[H", "a\rb", "\x1b]8;;http://e\x1b\\x", "\u202etxt", "\u2066a",
    "\u200b", "\u3164", "\u115f\u1160", "\u1100\u1161", "❤\ufe0f", "\U000e0101", "\x7f",
)  # fmt: skip
"""Texts that would drive a terminal, turn its text, or be drawn as nothing."""
_FROM_THIS_END = (events.EngineEnded, events.EngineLost, events.EngineBack, events.Composed)
_ANSWERS = (events.JobDone, events.JobGrown)
_ON_ITS_OWN = (events.OutputMeasured,)
"""Events that have a test of their own."""
KINDS: tuple[type, ...] = tuple(
    kind for kind in events.Event.__subclasses__() if kind not in (*_FROM_THIS_END, *_ON_ITS_OWN)
)


class RandomEvents:
    """Messages with what `chance` picks. tree: whose names are used now and then. recipes: those that events are about, mostly.
    hostile: whether all texts are `HOSTILE`, or names of the tree.
    """

    def __init__(self, chance: random.Random, tree: Tree, recipes: Sequence[Recipe], hostile: bool) -> None:
        self._chance = chance
        self._names: Sequence[str] = (*tree.modules, *tree.tensors)
        self._recipes = recipes
        self._texts = HOSTILE if hostile or chance.random() < 0.3 else TEXTS

    def next(self, kind: type | None = None) -> Iterator[bytes]:
        """Return the messages of one event of this kind, or of any kind."""
        kind = kind or self._chance.choice(KINDS)
        if "tree" in kind.__struct_fields__:  # type: ignore[attr-defined]
            for part in self._tree_parts():
                yield msgspec.msgpack.encode(part)
        yield msgspec.msgpack.encode(self._answer(kind) if kind in _ANSWERS else self._value(kind))

    def _answer(self, kind: type) -> list[Any]:
        """Return a result of a random job, final or intermediate."""
        name = self._chance.choice([*JOBS] if kind is events.JobDone else ["causes", "generate", "tokens"])
        types = job_types(JOBS[name].run)
        ask = ["Ask", name, self._value(types.parameters)]
        result = self._value(types.result if kind is events.JobDone else types.partial)
        return [kind.__name__, self._value(Recipe), ask, result]

    def _tree_parts(self) -> Iterator[list[Any]]:
        chance = self._chance
        with_classes = chance.random() < 0.7
        used = set[str]()
        for _ in range(chance.choice((0, 1, 1, 3))):
            kinds = ("parameter", "buffer", "non-persistent buffer")
            tensors: list[list[Any]] = [
                [
                    self._name(used),
                    self._shape(),
                    self._text(),
                    chance.choice(kinds),
                    [self._name(used) for _ in range(chance.choice((0, 0, 0, 1, 2)))],
                    self._int() if chance.random() < 0.1 else None,
                    self._text() if chance.random() < 0.1 else None,
                    chance.random() < 0.1,
                    chance.random() < 0.1,
                    [self._text()] * chance.randint(0, 2),
                    chance.choice((self._int(), "unknown")) if chance.random() < 0.1 else None,
                ]
                for _ in range(chance.choice((0, 1, 5, 30)))
            ]
            modules = [
                [self._text(), chance.choice((None, self._text())), chance.choice((None, self._text()))]
                for _ in range(chance.choice((0, 1, 20)))
            ]
            yield ["TreePart", with_classes, tensors, modules]

    def _name(self, used: set[str]) -> str:
        """A name of a tensor. It is rarely one of those `used`: a tree with two tensors of one name is refused as a whole."""
        name = self._text()
        if name in used and self._chance.random() < 0.99:
            name += f".{len(used)}"
        used.add(name)
        return name

    def _shape(self) -> list[int]:
        return [self._int() for _ in range(self._chance.choice((0, 1, 2, 2, 9)))]

    def _int(self) -> int:
        return self._chance.choice(INTS) if self._chance.random() < 0.2 else self._chance.randint(0, 4096)

    def _text(self) -> str:
        return self._chance.choice(self._names if self._chance.random() < 0.5 else self._texts)

    def _job(self, field: str, hint: Any) -> Any:
        """A value of a field: mostly names of jobs where it has such names."""
        if field not in ("job", "running", "waiting", "dropped") or self._chance.random() < 0.02:
            return self._value(hint)
        names = [self._chance.choice([*JOBS, *OWN_NAMES]) for _ in range(3)]
        return names if field in ("waiting", "dropped") else names[0]

    def _value(self, hint: Any) -> Any:
        chance = self._chance
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            return self._value(chance.choice(arguments))
        if origin is typing.Literal:
            return chance.choice(arguments)
        if origin is tuple and arguments[-1:] == (Ellipsis,):
            return [self._value(arguments[0]) for _ in range(chance.choice((0, 1, 1, 3, 40)))]
        if origin is tuple:
            return [self._value(argument) for argument in arguments]
        if origin is dict:
            return {self._value(arguments[0]): self._value(arguments[1]) for _ in range(chance.randint(0, 3))}
        if origin is Mapping:
            return {name: self._value(arguments[1]) for name in NAMES if chance.random() < 0.5}
        if hint is Recipe and chance.random() < 0.9:
            return msgspec.to_builtins(chance.choice(self._recipes))
        if hint is Tree or hint is type(None):
            return None
        if hint is bool:
            return chance.random() < 0.5
        if hint is int:
            return self._int()
        if hint is float:
            return chance.choice(FLOATS) if chance.random() < 0.5 else chance.uniform(0, 100)
        if hint is str:
            return self._text()
        if hint is bytes:
            return chance.randbytes(chance.choice((0, 1, 300)))
        if hint is Picture and chance.random() < 0.9:
            width, height = chance.choice((1, 2, 40, 256)), chance.choice((1, 3, 30, 256))
            return {"width": width, "height": height, "pixels": chance.randbytes(3 * width * height)}
        if issubclass(hint, msgspec.Struct):
            fields = [self._job(name, type_) for name, type_ in typing.get_type_hints(hint).items()]
            return [hint.__name__, *fields] if issubclass(hint, Message) else fields
        if dataclasses.is_dataclass(hint):
            names = typing.get_type_hints(hint)
            return {field.name: self._value(names[field.name]) for field in dataclasses.fields(hint) if field.init}
        raise AssertionError(f"no value is known for {hint}")
