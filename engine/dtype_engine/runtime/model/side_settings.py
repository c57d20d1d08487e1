"""Finds the numbers and other settings in which the modules of two checkpoints differ, such as the `variance_epsilon` of a norm, so
that a pass can run with the settings of either checkpoint.

Most modules copy what they need of the configuration into attributes when they are created. Some modules read the configuration
during a pass, so the attributes of the configuration are compared, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn

_OF_TORCH = frozenset(nn.Module().__dict__)
_PLAIN = (bool, int, float, str, type(None), torch.dtype, FunctionType)


@dataclass(frozen=True, slots=True)
class SideSettings:
    """The attributes of one module or configuration in which the reference model and the candidate differ."""

    module: str
    """The name of the module, or "" for the configuration of the model."""
    attributes: dict[str, Any]
    """The `__dict__` of the module or the configuration. It has the candidate's values between passes."""
    candidate: Mapping[str, Any]
    reference: Mapping[str, Any]
    """`candidate` and `reference` hold the differing attributes that each model has, keyed by name."""

    def use(self, of_reference: bool) -> None:
        """Give the attributes the values of the reference if `of_reference`, otherwise those of the candidate."""
        old, new = (self.candidate, self.reference) if of_reference else (self.reference, self.candidate)
        for name in old.keys() - new.keys():
            self.attributes.pop(name, None)
        self.attributes.update(new)


def side_settings(reference: nn.Module, candidate: nn.Module, ignored: frozenset[str]) -> list[SideSettings] | str:
    """Return the settings in which two models of the same architecture differ. If they differ in anything else, such as the class
    of a module, return the name of the first module or attribute that differs. ignored: entries of the configuration that change no
    output.
    """
    found: list[SideSettings] = []
    theirs, configurations = dict(reference.named_modules()), set[int]()
    for name, module in candidate.named_modules():
        other = theirs.get(name)
        if other is None or type(other).__qualname__ != type(module).__qualname__:
            return str(name)
        ours, others = module.__dict__, other.__dict__
        configuration, other_configuration = ours.get("config"), others.get("config")
        if _is_configuration(configuration) and id(configuration) not in configurations:
            configurations.add(id(configuration))
            entries = configuration.__dict__, other_configuration.__dict__
            differing = [
                key for key in _differing(*entries)
                if key not in ignored and not key.startswith("_") and not _is_configuration(entries[0].get(key))
            ]  # fmt: skip
            found += _settings("", *entries, differing)
        differing = [
            key for key in _differing(ours, others) if key not in _OF_TORCH and not _is_configuration(ours.get(key))
        ]
        for key in differing:
            if not (_is_plain(ours.get(key, ...)) and _is_plain(others.get(key, ...))):
                return f"{name}.{key}"
        found += _settings(name, ours, others, differing)
    return found


def _settings(name: str, ours: dict[str, Any], theirs: dict[str, Any], differing: list[str]) -> list[SideSettings]:
    candidate, reference = ({key: side[key] for key in differing if key in side} for side in (ours, theirs))
    return [SideSettings(name, ours, candidate, reference)] if differing else []


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    return [key for key in ours.keys() | theirs.keys() if not _same(ours.get(key, ...), theirs.get(key, ...))]


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal. Functions are compared by name, and objects whose class does not define `==` by type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one.cpu(), other.cpu())  # the other checkpoint's module stays on the CPU
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if callable(one) and hasattr(one, "__qualname__"):
        return bool(one.__qualname__ == other.__qualname__)
    own = any("__eq__" in vars(base) for base in type(one).__mro__[:-1])
    return not own or bool(one == other)


def _is_configuration(value: Any) -> bool:
    return hasattr(value, "to_dict")  # as a `PretrainedConfig` or a `GenerationConfig` of transformers


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _PLAIN)
