"""Encodes messages as MessagePack, for an engine in another process.

A tree is sent before its event, in parts of a few hundred tensors, because decoding it in one piece would delay the handling of
keys. Every message that arrives is checked: first its types, and then its values, because a wrong value could make the app fail.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import msgspec

# Annotations of messages name classes as `dtype_engine.results.…`, and msgspec looks them up when a decoder is made.
import dtype_engine.results.attribution
import dtype_engine.results.check
import dtype_engine.results.drift
import dtype_engine.results.execution
import dtype_engine.results.inputs
import dtype_engine.results.losses
import dtype_engine.results.memory
import dtype_engine.results.runs
import dtype_engine.results.scan
import dtype_engine.results.serving_memory
import dtype_engine.results.token_choices
import dtype_engine.results.weights  # noqa: F401
from dtype_engine.core.draft_heads import NO_DRAFT, DraftHead
from dtype_engine.core.errors import UserError
from dtype_engine.core.kv_cache import KVCache
from dtype_engine.core.text import EXACT, is_printable, printable, without_controls
from dtype_engine.core.token_reads import UNKNOWN, TokenReads
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.core.typed_data import path_of
from dtype_engine.service import commands, control, events
from dtype_engine.service.frames import WireError
from dtype_engine.service.jobs import JOBS, Ask
from dtype_engine.service.message import Message
from dtype_engine.service.save_requests import SaveRequest
from dtype_engine.service.value_checks import (
    MOST_NOTICES,
    check_draft_head,
    check_dtypes,
    check_kv_cache,
    check_length,
    check_losses,
    check_pictures,
    check_rules,
    check_token_reads,
)

_A_PART = 400
"""Maximum number of tensors, and of modules, in one `TreePart` message."""
_MOST_OF_A_TREE = 64 << 20
"""Maximum number of bytes of all parts of one tree. A tree of 90,000 tensors has 11 MiB."""
_LARGEST = 1 << 60
"""The largest integer that an event may contain. The largest integers in practice are numbers of bytes."""


_TENSOR = tuple(field.name for field in dataclasses.fields(TensorInfo) if field.init)
if TYPE_CHECKING:
    _Tensor = tuple[Any, ...]
else:
    _Tensor = tuple[tuple(map(typing.get_type_hints(TensorInfo).get, _TENSOR))]
"""A tensor of a tree as it is sent: the values of the `TensorInfo` fields that `_TENSOR` lists, in this order."""


class TreePart(Message, frozen=True):
    """Some of a tree's tensors and modules."""

    with_classes: bool
    """Whether the tree contains the modules' classes."""
    tensors: tuple[_Tensor, ...]
    modules: tuple[tuple[str, str | None, str | None], ...]
    """For each module: its name, its class, and why it must stay in float32; the last two may be None. A tensor that must stay
    in float32 by itself has an entry, too, without a class.
    """
    kv_cache: KVCache | None = None
    """The tree's KV cache, only in its first part."""
    draft: DraftHead | None = None
    """The tree's draft head, only in its first part."""
    token_reads: TokenReads | None = None
    """What a token reads of the tree's weights, only in its first part."""


Request = commands.FromTheApp | Ask | SaveRequest | control.FromTheApp
Answer = events.Event | control.Hello | control.Opened
_ANSWERS: Any = Union[(control.Hello, control.Opened, *events.Event.__subclasses__())]


def _plain(value: object) -> str | None:
    """Encode a Path as a string, and a tree as None, because its parts are sent before its event. This is msgspec's `enc_hook`."""
    if isinstance(value, Tree):
        return None
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def _from_plain(kind: type, value: object) -> object:
    """Decode a Path. This is msgspec's `dec_hook`. Job parameters (type `object`) stay plain until `_typed` converts them."""
    return value if kind is object else path_of(kind, value)


_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request, dec_hook=_from_plain)


def encode_request(request: Message) -> bytes:
    """Return one message from the app as MessagePack."""
    return _ENCODER.encode(request)


def decode_request(data: bytes) -> Request:
    """Return the message that `encode_request` encoded. Raises WireError."""
    try:
        request = _REQUESTS.decode(data)
        if not isinstance(request, Ask):
            return request
        request = _typed(request)
        if request.traits.follows:
            raise ValueError(f"no app asks for the job {request.name}")
        return request
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(str(error)) from None


def encode_answer(answer: Answer) -> Iterator[bytes]:
    """Return the MessagePack messages for one event: first the parts of its tree, if it has one, then the event."""
    if isinstance(answer, events.HeadersRead | events.ModelReady):
        yield from _tree_parts(answer.tree)
    yield _ENCODER.encode(answer)


class AnswerDecoder:
    """Decodes an engine's messages in order. The engine is not trusted: types are checked, and texts are escaped."""

    def __init__(self) -> None:
        self._tree = Tree(())
        self._with_classes = False
        self._modules: list[tuple[str, str | None, str | None]] = []
        self._tensors: list[TensorInfo] = []
        self._kv_cache, self._draft, self._token_reads = KVCache(), NO_DRAFT, UNKNOWN
        self._bytes = 0
        """Total bytes of the incomplete tree's parts that have arrived."""
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Maps each shape to itself, so that tensors share one tuple: 90,000 tensors may have only a few dozen shapes."""

    def begin_again(self) -> None:
        """Forget the parts of an incomplete tree, because the engine will send all of them again."""
        self._modules, self._tensors, self._with_classes, self._bytes = [], [], False, 0

    def decode(self, data: bytes) -> Answer | None:
        """Decode one message. Returns its event, or None for a part of a tree. Raises WireError."""
        try:
            plain = msgspec.msgpack.decode(data)
            if isinstance(plain, list) and plain[:1] == ["TreePart"]:
                self._bytes += len(data)
                if self._bytes > _MOST_OF_A_TREE:
                    raise ValueError(f"a tree of more than {_MOST_OF_A_TREE:,} bytes")
                self._take_part(msgspec.convert(plain, TreePart))
                return None
            is_safe = _is_safe(plain)
            answer: Answer = msgspec.convert(plain, _ANSWERS, dec_hook=self._tree_of)
            if isinstance(answer, events.JobDone | events.JobGrown):
                answer = _with_result(answer)
            answer = answer if is_safe else safe(answer)
            check_event(answer)
            return answer
        except (msgspec.MsgspecError, UserError, ValueError, LookupError, OverflowError, RecursionError) as error:
            raise WireError(str(error)) from None

    def _tree_of(self, kind: type, value: object) -> object:
        """Return the tree of an event, made of the parts that came before it. This is msgspec's `dec_hook`. Parameters and results
        of jobs have the type `object` and stay plain. Raises ValueError for a field of another type.
        """
        if kind is object:
            return value
        if kind is not Tree or value is not None:
            raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
        self._tree = self._made_tree()
        return self._tree

    def _take_part(self, part: TreePart) -> None:
        self._with_classes = part.with_classes
        self._modules += part.modules
        if part.kv_cache is not None:
            check_kv_cache(part.kv_cache)
            self._kv_cache = safe(part.kv_cache)
        if part.draft is not None:
            check_draft_head(part.draft)
            self._draft = part.draft
        if part.token_reads is not None:
            check_token_reads(part.token_reads)
            self._token_reads = safe(part.token_reads)
        for name, shape, dtype, kind, aliases, packed, why, *others, of_reference in part.tensors:
            rest: Any = (*others, None if of_reference is None else printable(of_reference))
            shape, dtype = self._shapes.setdefault(shape, shape), sys.intern(printable(dtype))
            why = None if why is None else without_controls(why)
            tensor = TensorInfo(name, shape, dtype, kind, aliases, packed, why, *rest)
            sizes = (*shape, tensor.nbytes, tensor.parameters)
            if min(sizes) < 0 or max(sizes) > _LARGEST:
                raise ValueError(f"no tensor has the shape {shape} in {dtype}")
            before = self._tree.tensors.get(name)
            self._tensors.append(before if before == tensor else tensor)  # sharing them saves 60 MiB for 90,000

    def _made_tree(self) -> Tree:
        modules, tensors, with_classes = self._modules, self._tensors, self._with_classes
        self.begin_again()
        if len({name for tensor in tensors for name in tensor.names}) < sum(len(tensor.names) for tensor in tensors):
            raise ValueError("two tensors of a tree have one name")
        tree = Tree(
            tensors,
            {name: without_controls(kind) for name, kind, _ in modules if kind is not None} if with_classes else None,
            by_number=not with_classes,
        )
        tree.kv_cache, tree.draft, tree.token_reads = self._kv_cache, self._draft, self._token_reads
        for name, _, kept in modules:
            if kept is not None and name in tree.modules:
                tree.modules[name].keep_in_fp32 = without_controls(kept)
            elif kept is not None and name in tree.tensors:
                tree.kept_in_fp32[name] = without_controls(kept)
        return tree


def check_event(event: Answer) -> None:
    """Check the values of an event, which may come from another program. Its recipe is not checked, because the app only compares
    it.

    Raises ValueError for a value that no engine of this version sends, and UserError for a rule that does not parse.
    """
    match event:
        case events.HeadersRead() | events.ModelReady() | events.Saved() | events.Composed():
            check_length(event.notices, MOST_NOTICES)
        case events.InputsReady():
            check_length(event.summary.made_of)
        case events.CastDone():
            check_losses(event.lost or ())
        case events.Measured() | events.RecipeMeasured():
            check_length(event.report.notices, MOST_NOTICES)
            check_losses(event.report.lost or ())
            check_pictures(event.report.pictures)
            if isinstance(event, events.RecipeMeasured):
                check_rules(event.report.rules)
        case events.ExportPlanned() if event.plan is not None:
            check_losses(event.plan.lost or ())
        case events.ScanUpdated():
            if not event.report.dtypes:
                raise ValueError("a scan of no dtypes")
            check_dtypes((*event.report.dtypes, *{score.dtype for score in event.report.weights}))
        case events.JobDone():
            event.ask.traits.check(event.result)
        case events.Refused():
            _check_jobs((event.job,))
        case events.Stopped():
            _check_jobs((*event.dropped, *((event.job,) if event.job is not None else ())))
        case events.Jobs():
            _check_jobs((*event.waiting, *((event.running,) if event.running else ())))


def _check_jobs(names: Iterable[str]) -> None:
    for name in names:
        if name not in JOBS and name not in commands.OWN_NAMES:
            raise ValueError(f"there is no job {name}")


class JobTypes(typing.NamedTuple):
    """The types of a job's parameters, of its results while it runs, and of its final result."""

    parameters: Any
    partial: Any
    result: Any


@lru_cache
def job_types(run: Callable[..., object]) -> JobTypes:
    """Return the types in the annotations of a job's function `run`."""
    work, parameters, result = typing.get_type_hints(run, include_extras=True).values()
    (partial,) = typing.get_args(work)
    return JobTypes(parameters, partial, result)


def _typed(ask: Ask) -> Ask:
    """Return the request with its parameters converted to the type that the job takes. Raises ValueError for an unknown job."""
    if ask.job not in JOBS:
        raise ValueError(f"there is no job {ask.job}")
    return msgspec.structs.replace(
        ask, parameters=msgspec.convert(ask.parameters, job_types(ask.traits.run).parameters)
    )


def _with_result(event: events.JobDone | events.JobGrown) -> events.JobDone | events.JobGrown:
    """Return the event with its result converted to the job's type of results. Raises ValueError if the job has no such result."""
    ask = _typed(event.ask)
    types = job_types(ask.traits.run)
    result = msgspec.convert(event.result, types.result if isinstance(event, events.JobDone) else types.partial)
    if result is None:
        raise ValueError(f"the job {ask.name} has no such result")
    return msgspec.structs.replace(event, ask=ask, result=result)


def _is_safe(value: object) -> bool:
    """Return whether all text of a message is printable. Raises ValueError for an integer that is too large for any event."""
    if isinstance(value, str):
        return is_printable(value)
    if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"{value} is no figure of anything")
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return False not in [_is_safe(item) for item in value] if isinstance(value, list) else True  # all are checked


def safe(value: Any, exact: bool = False) -> Any:
    """Return a message, or a value in it, with control characters escaped, so that a terminal does not interpret them. Fields
    of the type `Name` stay unchanged, because the app compares them with its own names; they are escaped where they are drawn.
    exact: whether `value` is in such a field.
    """
    if isinstance(value, str):
        return value if exact else without_controls(value)
    if isinstance(value, tuple):
        return tuple(safe(item, exact) for item in value)
    if isinstance(value, dict):
        return {safe(key, exact): safe(item, exact) for key, item in value.items()}
    kind: Any = type(value)
    if isinstance(value, msgspec.Struct) or dataclasses.is_dataclass(kind):
        replace: Any = msgspec.structs.replace if isinstance(value, msgspec.Struct) else dataclasses.replace
        return replace(value, **{name: safe(getattr(value, name), names) for name, names in _fields(kind).items()})
    return value


@lru_cache
def _fields(kind: Any) -> dict[str, bool]:
    """Return, for each field of a class of events or results, whether its type is or contains `Name`, which is not escaped."""
    hints = typing.get_type_hints(kind, include_extras=True)
    if issubclass(kind, msgspec.Struct):
        names = kind.__struct_fields__
    else:
        names = tuple(field.name for field in dataclasses.fields(kind) if field.init)
    return {name: _has_names(hints[name]) for name in names}


def _has_names(hint: Any) -> bool:
    return EXACT in getattr(hint, "__metadata__", ()) or any(map(_has_names, typing.get_args(hint)))


def _tree_parts(tree: Tree) -> Iterator[bytes]:
    tensors = (tuple(getattr(tensor, name) for name in _TENSOR) for tensor in tree.tensors.values())
    modules = chain(
        (
            (module.name, module.class_name, module.keep_in_fp32)
            for module in tree.modules.values()
            if module.class_name is not None or module.keep_in_fp32 is not None
        ),
        ((name, None, why) for name, why in tree.kept_in_fp32.items()),
    )
    kv_cache: KVCache | None = tree.kv_cache
    draft: DraftHead | None = tree.draft
    reads: TokenReads | None = tree.token_reads
    while True:
        taken = tuple(islice(tensors, _A_PART)), tuple(islice(modules, _A_PART))
        part = TreePart(tree.has_classes, *taken, kv_cache, draft, reads)
        kv_cache, draft, reads = None, None, None
        yield _ENCODER.encode(part)
        if not part.tensors and not part.modules:
            return
