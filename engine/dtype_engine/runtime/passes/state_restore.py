"""Saves a model's state before a forward pass, and restores it afterwards."""

from __future__ import annotations

import functools
import gc
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from enum import Enum
from itertools import chain
from numbers import Number
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import nn

from dtype_engine.runtime.device import same_random_numbers
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.passes.model_behavior import ModelBehavior
from dtype_engine.runtime.passes.side_by_side import SideBySide

_CONTAINERS = (list, dict, set, deque, tuple)
_LruCache = type(functools.cache(int))
_NO_HOLDERS = (nn.Module, ModuleType, Enum)
_DEPTH = 6
"""Maximum nesting depth at which containers and objects are inspected."""
_OF_TORCH = frozenset(nn.Module().__dict__)
_NOT_OWN = frozenset({"builtins", "torch", "transformers"})
"""Packages whose classes and global variables are not searched for tensors, since models do not store tensors there."""
_WITH_TENSORS = ("_parameters", "_buffers", "_modules")
"""The attributes of an `nn.Module` whose dicts hold its tensors and submodules. Other dicts of a module hold hooks."""


@contextmanager
def stored_values(model: LiveModel) -> Iterator[None]:
    """Let the parameters of `model` hold their stored values in the `with` block. On the CPU, no data is copied."""
    changed = [weight for weight in model.weights.values() if weight.differs]
    try:
        for weight in changed:
            weight.stashed = weight.tensor.data
            weight.tensor.data = weight.reference.held(weight.tensor.device)
        yield
    finally:
        for weight in changed:
            if weight.stashed is not None:
                weight.tensor.data, weight.stashed = weight.stashed, None


@contextmanager
def as_every_pass(
    model: LiveModel,
    behavior: ModelBehavior,
    modules: Collection[nn.Module],
    watching: WeightMode | SideBySide,
    earlier: SavedState | None = None,
) -> Iterator[tuple[SavedState, Callable[[], bool]]]:
    """Make the forward pass in the `with` block start with the same state and random numbers as every other pass. Code compiled by
    `torch.compile` runs uncompiled, because it would bypass the interception of module calls and torch-function modes. The state is
    restored after the block. Values that a model computes from its weights at the first call are therefore computed again, from the
    currently cast weights. Yields the saved state, and a function that restores it immediately and returns whether the model is
    `stateful`.

    behavior: its `stateful` becomes True if anything had to be restored. modules: the modules whose state is restored. watching:
    tells whether the pass has changed tensors. earlier: the state that was saved before an earlier pass, which is used again if
    nothing has changed since.
    """
    state = earlier if earlier is not None and earlier.still_holds() else SavedState(modules)
    watching.kept = state.tensors

    def restore() -> bool:
        behavior.stateful |= state.restore(watching.wrote) or watching.wrote
        return behavior.stateful

    with same_random_numbers(model.device):
        try:
            with _uncompiled():
                yield state, restore
        finally:
            restore()


def _uncompiled() -> AbstractContextManager[None]:
    if "torch._dynamo" not in sys.modules:
        return nullcontext()  # nothing is compiled, and importing torch._dynamo takes a second
    return cast(AbstractContextManager[None], torch.compiler.set_stance("force_eager"))


class SavedState:
    """The saved state of some modules: their tensors, numbers, containers and objects. Tensors in the following places are saved,
    too: attributes of the modules' classes, global variables of the Python modules that define these classes, and containers and
    caches of functions there, such as a `functools.lru_cache`.
    """

    def __init__(self, modules: Collection[nn.Module]) -> None:
        self.tensors: list[torch.Tensor] = []
        """The tensors in attributes of modules."""
        self._named: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Pairs (attribute dict of a module or object, its saved copy)."""
        self._containers: list[tuple[Any, Any]] = []
        """Pairs (container, its saved copy)."""
        self._shared: list[tuple[type | ModuleType, dict[str, Any]]] = []
        """Pairs (class or Python module, saved copy of its attributes)."""
        self._caches: list[Any] = []
        """Functions that are decorated with a cache of `functools`."""
        self._kept: list[tuple[Any, Any]] = []
        """Pairs (container that a class, a Python module or a function keeps, its saved copy)."""
        self._seen: set[int] = set()
        for module in modules:
            self._add_module(module)
        self._add_shared(set(map(type, modules)))
        self._of_modules = _Unchanged((*self._named, *self._containers))

    def still_holds(self) -> bool:
        """Return whether everything is as it was when the state was saved. Saving it again takes several times as long."""
        return (
            not any(map(_caches_tensors, self._caches))
            and self._of_modules.holds()
            and all(_has_same(*each) for each in self._kept)
            and all(_has_same(dict(vars(holder)), had) for holder, had in self._shared)
        )

    def _add_module(self, module: nn.Module) -> None:
        attributes = module.__dict__
        of_torch = [attributes[name] for name in _WITH_TENSORS if isinstance(attributes[name], dict)]
        self._named += [(each, each.copy()) for each in (attributes, *of_torch)]
        for name, value in attributes.items():
            if name not in _OF_TORCH:
                self._add(value, _DEPTH)

    def _add_shared(self, kinds: Collection[type]) -> None:
        """Save the attributes of the classes `kinds` and their bases, and the global variables of the modules that define them."""
        own = {base for kind in kinds for base in kind.__mro__ if base.__module__.partition(".")[0] not in _NOT_OWN}
        names = {base.__module__ for base in own}
        holders: list[type | ModuleType] = [*own, *(sys.modules[name] for name in names if name in sys.modules)]
        for holder in holders:
            had = dict(vars(holder))
            for value in had.values():
                self._add_function(value)
                if type(value) in _CONTAINERS:
                    self._kept.append((value, copy(value)))
                elif isinstance(value, torch.Tensor):
                    self.tensors.append(value)
            self._shared.append((holder, had))

    def _add_function(self, value: Any) -> None:
        """Save the containers in which a function may keep tensors: its closure, defaults and attributes. A cache of `functools`
        that holds tensors is cleared, so that the next forward pass computes them from the current weights.
        """
        if isinstance(value, (property, staticmethod, classmethod, functools.cached_property)):
            value = next(
                each
                for each in (getattr(value, name, None) for name in ("fget", "func", "__func__"))
                if each is not None
            )
        if isinstance(value, MethodType):
            value = value.__func__
        if isinstance(value, _LruCache):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._caches.append(value)
                if _caches_tensors(value):
                    value.cache_clear()
            value = value.__wrapped__
        if not isinstance(value, FunctionType):
            return
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        for kept in (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), vars(value)):
            if type(kept) in _CONTAINERS and type(kept) is not tuple and id(kept) not in self._seen:
                self._seen.add(id(kept))
                self._kept.append((kept, copy(kept)))
            elif isinstance(kept, _LruCache):
                self._add_function(kept)

    def _restore_shared(self) -> bool:
        """Restore those shared attributes and containers in which a tensor was added, replaced or removed, and clear the caches of
        functions that hold tensors. Returns whether anything was restored or cleared.
        """
        restored = False
        for cached in self._caches:
            if _caches_tensors(cached):
                cached.cache_clear()
                restored = True
        for holder, had in self._shared:
            now = vars(holder)
            for name in [name for name in now.keys() | had.keys() if now.get(name) is not had.get(name)]:
                if _has_tensor(now.get(name)) or _has_tensor(had.get(name)):
                    if name in had:
                        setattr(holder, name, had[name])
                    else:
                        delattr(holder, name)
                    restored = True
        for kept, before in self._kept:
            if not _has_same(kept, before) and (_has_tensor(kept) or _has_tensor(before)):
                _refill(kept, before)
                restored = True
        return restored

    def _add(self, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return
        holders = self._containers
        if type(value) not in _CONTAINERS:
            if callable(value):
                self._add_function(value)
            if isinstance(value, _NO_HOLDERS) or callable(value) or not hasattr(value, "__dict__"):
                return
            value, holders = vars(value), self._named
        if id(value) in self._seen or not depth:
            return
        self._seen.add(id(value))
        if type(value) is not tuple:
            holders.append((value, copy(value)))
        for item in list(value.values() if isinstance(value, dict) else value):
            self._add(item, depth - 1)

    def restore(self, wrote: bool) -> bool:
        """Restore what has changed. Returns whether a tensor, a number or the contents of a container had changed.

        If a tensor has changed, or if the pass wrote to one (`wrote`), all attributes are restored, including flags such as
        "already initialized". Otherwise, changed flags and functions stay, such as hooks that are registered only once.
        """
        wrote |= self._restore_shared()
        if not wrote and self._of_modules.holds():
            return False
        containers = [(holder, had) for holder, had in self._containers if not _has_same(holder, had)]
        for holder, had in containers:
            _refill(holder, had)
        named = [(holder, had) for holder, had in self._named if not _has_same(holder, had)]
        everything = wrote or any(_has_tensor(value) for holder, had in named for value in _changed(holder, had))
        numbers = False
        for holder, had in named:
            if everything:
                _refill(holder, had)
                continue
            for name, number in had.items():
                if _is_number(number) and holder.get(name) is not number:
                    holder[name], numbers = number, True
        return bool(containers) or everything or numbers


class _Unchanged:
    """Tells whether many containers still equal their copies, in a fifth of the time that `_has_same` takes for all of them."""

    def __init__(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        self._sets = [pair for pair in pairs if isinstance(pair[0], set)]
        self._others = [container for container, _ in pairs if not isinstance(container, set)]
        self._dicts = [container for container in self._others if isinstance(container, dict)]
        self._sizes = list(map(len, self._others))
        self._had = list(self._contents())

    def _contents(self) -> Iterator[Any]:
        return chain(chain.from_iterable(self._others), chain.from_iterable(map(dict.values, self._dicts)))

    def holds(self) -> bool:
        same_sizes = list(map(len, self._others)) == self._sizes
        return (
            same_sizes and all(map(is_, self._contents(), self._had)) and all(_has_same(*each) for each in self._sets)
        )


def _changed(holder: dict[str, Any], had: dict[str, Any]) -> Iterator[Any]:
    for name in holder.keys() | had.keys():
        if holder.get(name) is not had.get(name):
            yield from (holder.get(name), had.get(name))


def _has_tensor(value: Any, depth: int = _DEPTH) -> bool:
    if type(value) in _CONTAINERS and depth:
        return any(_has_tensor(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor)


def _caches_tensors(cached: Any) -> bool:
    if not cached.cache_info().currsize:
        return False
    seen, waiting = set[int](), [(cached, _DEPTH)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, torch.Tensor):
            return True
        if depth and id(value) not in seen and not isinstance(value, (type, ModuleType, FunctionType, nn.Module)):
            seen.add(id(value))
            waiting += [(each, depth - 1) for each in gc.get_referents(value)]
    return False


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the variable has no value yet
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) and not isinstance(value, bool)


def _has_same(container: Any, had: Any) -> bool:
    """Return whether a container has the same objects as its copy `had`. `==` on tensors is elementwise, so identity counts."""
    if isinstance(container, set):
        return bool(container == had)
    same = len(container) == len(had) and all(map(is_, container, had))
    return same and (not isinstance(container, dict) or all(map(is_, container.values(), had.values())))


def _refill(container: Any, had: Any) -> None:
    if not isinstance(container, dict):
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(had)
        return
    for name in container.keys() - had.keys():
        del container[name]
    container.update(had)
