"""Commands and events as MessagePack, for an engine in another process.

A message is an array: its name, then its fields in their order. Nothing that arrives is believed before msgspec has checked it
against the types of its class. Two things are not sent as they are: a recipe, which the app made and numbered, goes as its
number; a tree goes before its event, in parts of a few hundred tensors, so that none holds the interpreter for longer than a key
may wait.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from dtype_engine.core.errors import UserError
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.core.text import printable, without_controls
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.core.typed_data import path_of
from dtype_engine.recipe import Recipe
from dtype_engine.results import attribution, drift, inputs, losses, memory, runs, scan, weights
from dtype_engine.worker import commands, events, save_requests
from dtype_engine.worker.checks import check_event
from dtype_engine.worker.frames import WireError

PROTOCOL = 3
"""Changes with every message that changes."""
_A_PART = 400
"""Tensors, and modules, of a part of a tree."""
_LARGEST = 1 << 60
"""Of the whole numbers in an event, bytes most of all."""


class Hello(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The engine's first message. missing: packages that it needs and does not have. requests: how many it has had, after `Open`.
    is_open: it has a model from an earlier connection.
    """

    protocol: int
    version: str
    missing: tuple[str, ...] = ()
    requests: int = 0
    is_open: bool = False


class Open(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The app's first message to a new engine: what `Worker` is made of. `model` as on the command line. recipe: rules that are
    refused, and the model with them, where one takes nothing.
    """

    model: str | None
    options: Options
    read_headers: bool
    recipe: Recipe = Recipe()


class Resume(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The app's first message to an engine that it had before: how many events it has had of it."""

    received: int


class Opened(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The engine's answer to `Open`: what MODEL means there, or why it means nothing."""

    title: str
    refusal: str = ""


class Acknowledge(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """How many events the app has had: the engine need not keep these."""

    received: int


class SaveOf(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """`Engine.save`; `kind`: the request's class."""

    kind: str
    request: Any


class PlanExport(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """`Engine.plan_export`."""


class CheckPath(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """`Engine.check_path`."""

    path: str


class Close(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """End: nobody will come back."""


class TreePart(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Some of a tree's tensors, each as the fields of a TensorInfo without the defaults at its end, and some of its modules: name,
    class, reason to stay in float32. with_classes: whether the tree knows the modules' classes.
    """

    with_classes: bool
    tensors: tuple[Any, ...]
    modules: tuple[tuple[str, str | None, str | None], ...]


Request = commands.Request | Open | Resume | Acknowledge | SaveOf | PlanExport | CheckPath | Close
Answer = events.Event | Hello | Opened
_ENVELOPE = (Hello, Open, Resume, Opened, Acknowledge, SaveOf, PlanExport, CheckPath, Close, TreePart)
_NAMES = {
    name: value
    for module in (attribution, drift, inputs, losses, memory, runs, scan, weights, save_requests, commands)
    for name, value in vars(module).items()
    if isinstance(value, type)
} | {"Recipe": Recipe, "RunSettings": RunSettings, "Tree": None, "JobName": commands.JobName}
_SAVES = {kind.__name__: kind for kind in typing.get_args(save_requests.SaveRequest)}


def _wire_class(kind: type, names: dict[str, Any], tag: bool = True) -> Any:
    """A struct with the fields of a named tuple or data class."""
    hints = typing.get_type_hints(kind, localns=names)
    if dataclasses.is_dataclass(kind):
        own = [(field.name, field.default) for field in dataclasses.fields(kind) if field.init]
    else:
        defaults = kind._field_defaults  # type: ignore[attr-defined]
        own = [(name, defaults.get(name, dataclasses.MISSING)) for name in hints]
    fields = [
        (name, hints[name]) if default is dataclasses.MISSING else (name, hints[name], default) for name, default in own
    ]
    return msgspec.defstruct(kind.__name__, fields, array_like=True, tag=tag, frozen=True)


def _wire_classes(kinds: Iterable[type], names: dict[str, Any]) -> dict[str, tuple[Any, type]]:
    return {kind.__name__: (_wire_class(kind, names), kind) for kind in kinds}


_EVENTS = _wire_classes(typing.get_args(events.Event), _NAMES | {"Recipe": int})
_COMMANDS = _wire_classes(
    (
        commands.SetRecipe,
        commands.FollowRecipe,
        commands.SetSettings,
        commands.Pause,
        commands.Cancel,
        commands.SetInputs,
        commands.Measure,
        commands.TraceCasts,
        commands.AttributeDrift,
        commands.MeasureSpeed,
        commands.Generate,
        commands.Scan,
        commands.MeasureRecipes,
        commands.InspectWeight,
    ),
    _NAMES,
)
_TENSOR = [(field.name, field.default) for field in dataclasses.fields(TensorInfo) if field.init]


class RecipeNumbers:
    """Recipes in the order in which the app asked for them; 0 is the empty one. Both ends number alike."""

    def __init__(self) -> None:
        self._recipes = [Recipe()]
        self._numbers = {Recipe(): 0}

    def note(self, request: object) -> None:
        """Number the recipe of a request, if it has a new one."""
        if isinstance(request, (commands.SetRecipe, commands.FollowRecipe)) and request.recipe not in self._numbers:
            self._numbers[request.recipe] = len(self._recipes)
            self._recipes.append(request.recipe)

    def number(self, recipe: Recipe) -> int:
        """The number of a recipe that was asked for."""
        return self._numbers[recipe]

    def recipe(self, number: int) -> Recipe:
        """The recipe of a number. Raises WireError."""
        if not 0 <= number < len(self._recipes):
            raise WireError(f"there is no recipe {number}")
        return self._recipes[number]


def encode_request(request: Request) -> bytes:
    """One message of the app."""
    if isinstance(request, _ENVELOPE):
        return _ENCODER.encode(request)
    return _ENCODER.encode([type(request).__name__, *(getattr(request, name) for name in _fields(request))])


def decode_request(data: bytes) -> Request:
    """What `encode_request` was given. Raises WireError."""
    try:
        message = _REQUESTS.decode(data)
        kind = _COMMANDS.get(type(message).__name__)
        if isinstance(message, SaveOf):
            return SaveOf(message.kind, msgspec.convert(message.request, _SAVES[message.kind], dec_hook=path_of))
        return typing.cast(Request, kind[1](*_values(message)) if kind else message)
    except (msgspec.MsgspecError, KeyError, ValueError, RecursionError) as error:
        raise WireError(str(error)) from None


def encode_answer(answer: Answer, recipes: RecipeNumbers) -> Iterator[bytes]:
    """The messages that one event takes: parts of a tree first, if it has one."""
    if isinstance(answer, _ENVELOPE):
        yield _ENCODER.encode(answer)
        return
    plain: list[object] = [type(answer).__name__]
    for value in answer:
        if isinstance(value, Tree):
            yield from _tree_parts(value)
            value = None
        plain.append(recipes.number(value) if isinstance(value, Recipe) else value)
    yield _ENCODER.encode(plain)


def pack_tree(tree: Tree) -> tuple[bytes, ...]:
    """A tree in a hundredth of the memory that it takes."""
    return tuple(zlib.compress(part, 1) for part in _tree_parts(tree))


def unpack_tree(parts: Iterable[bytes]) -> Tree:
    """What `pack_tree` was given."""
    decoder = AnswerDecoder(RecipeNumbers())
    for part in parts:
        decoder.decode(zlib.decompress(part))
    return decoder.made_tree()


class AnswerDecoder:
    """Reads an engine's messages in their order, and believes nothing: types are checked, text is made safe to show."""

    def __init__(self, recipes: RecipeNumbers) -> None:
        self._recipes = recipes
        self._tree = Tree(())
        self._with_classes = False
        self._modules: list[tuple[str, str | None, str | None]] = []
        self._tensors: list[TensorInfo] = []
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Of all tensors so far: 90,000 of them have a few dozen shapes."""

    def begin_again(self) -> None:
        """Forget a tree whose parts have not all come: it is sent again."""
        self._modules, self._tensors, self._with_classes = [], [], False

    def decode(self, data: bytes) -> Answer | None:
        """What one message completes; None where more belongs to it. Raises WireError."""
        try:
            plain = msgspec.msgpack.decode(data)
            if isinstance(plain, list) and plain and plain[0] == "TreePart":
                self._take_part(msgspec.convert(plain, TreePart))
                return None
            return self._answer(msgspec.convert(self._safe(plain), _ANSWERS))
        except (
            msgspec.MsgspecError,
            UserError,
            TypeError,
            ValueError,
            LookupError,
            OverflowError,
            RecursionError,
        ) as error:
            raise WireError(str(error)) from None

    def _answer(self, message: Any) -> Answer:
        _, kind = _EVENTS.get(type(message).__name__, (None, None))
        if kind is None:
            return typing.cast(Answer, message)
        values = dict(zip(type(message).__struct_fields__, _values(message), strict=True))
        if "recipe" in values:
            values["recipe"] = self._recipes.recipe(values["recipe"])
        if "tree" in values:
            values["tree"] = self._tree = self.made_tree()
        event = kind(**values)
        check_event(event)
        return typing.cast(Answer, event)

    def _safe(self, value: Any) -> Any:
        """`value` without characters that a terminal takes for commands, but for names of the tree, which are shown escaped."""
        if isinstance(value, str):
            known = value.isprintable() or value in self._tree.modules or self._tree.canonical(value) is not None
            return value if known else without_controls(value)
        if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
            raise ValueError(f"{value} is no figure of anything")
        if isinstance(value, list):
            return [self._safe(item) for item in value]
        if isinstance(value, dict):
            return {self._safe(key): self._safe(item) for key, item in value.items()}
        return value

    def _take_part(self, part: TreePart) -> None:
        self._with_classes = part.with_classes
        self._modules += part.modules
        for fields in part.tensors:
            name, shape, dtype, *rest = _values(msgspec.convert(fields, _Tensor))
            tensor = TensorInfo(name, self._shapes.setdefault(shape, shape), sys.intern(printable(dtype)), *rest)
            sizes = (*shape, tensor.nbytes, tensor.parameters)
            if min(sizes) < 0 or max(sizes) > _LARGEST:
                raise ValueError(f"no tensor has the shape {shape} in {dtype}")
            before = self._tree.tensors.get(name)
            self._tensors.append(before if before == tensor else tensor)  # of 90,000, one tree's alone are 60 MiB

    def made_tree(self) -> Tree:
        """The tree of the parts since the last one."""
        modules, tensors, with_classes = self._modules, self._tensors, self._with_classes
        self._modules, self._tensors = [], []
        tree = Tree(
            tensors,
            {name: self._safe(kind) for name, kind, _ in modules if kind is not None} if with_classes else None,
            by_number=not with_classes,
        )
        for name, _, kept in modules:
            if kept is not None and name in tree.modules:
                tree.modules[name].keep_in_fp32 = self._safe(kept)
        return tree


def _tree_parts(tree: Tree) -> Iterator[bytes]:
    tensors = (_trimmed(tensor) for tensor in tree.tensors.values())
    modules = (
        (module.name, module.class_name, module.keep_in_fp32)
        for module in tree.modules.values()
        if module.class_name is not None or module.keep_in_fp32 is not None
    )
    while True:
        part = TreePart(tree.has_classes, tuple(islice(tensors, _A_PART)), tuple(islice(modules, _A_PART)))
        yield _ENCODER.encode(part)
        if not part.tensors and not part.modules:
            return


def _trimmed(tensor: TensorInfo) -> list[object]:
    values = [getattr(tensor, name) for name, _ in _TENSOR]
    while values[-1] == _TENSOR[len(values) - 1][1]:
        values.pop()
    return values


def _fields(request: Any) -> Sequence[str]:
    return [field.name for field in dataclasses.fields(request)]


def _values(message: Any) -> Iterator[Any]:
    return (getattr(message, name) for name in message.__struct_fields__)


_Tensor = _wire_class(TensorInfo, {}, tag=False)
_ENCODER = msgspec.msgpack.Encoder(enc_hook=str)
_REQUESTS = msgspec.msgpack.Decoder(
    typing.Union[
        (Open, Resume, Acknowledge, SaveOf, PlanExport, CheckPath, Close, *(made for made, _ in _COMMANDS.values()))
    ],
    dec_hook=path_of,
)
_ANSWERS: Any = typing.Union[(Hello, Opened, *(made for made, _ in _EVENTS.values()))]
