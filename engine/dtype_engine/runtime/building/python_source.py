"""Builds a model with the user's own class or function, and loads weights from a checkpoint if the user names one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dtype_engine.checkpoint import FileIdentity, open_checkpoint
from dtype_engine.checkpoint.source import Source
from dtype_engine.core.errors import UserError, one_line
from dtype_engine.core.foreign_code import failures_as, with_type
from dtype_engine.core.options import ModelOptions
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.results.coverage import Coverage
from dtype_engine.runtime.libraries.silence_libraries import quiet
from dtype_engine.runtime.libraries.torch_private import tensor_slots
from dtype_engine.runtime.model.device_map import places_of, require_fit
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.model.module_tree import collect_tensors
from dtype_engine.runtime.weights.checkpoint_weights import source_of

OnStep = Callable[[str], None]


def _load_weights(
    module: nn.Module, file: Path, trust: bool, title: str
) -> tuple[tuple[str, ...], Coverage, tuple[FileIdentity, ...]]:
    """Load a checkpoint's tensors into a module, memory-mapped and in their stored dtypes. Returns notices, how many of the
    module's tensors the checkpoint has, and the identities of the files before they were read. Raises UserError if the checkpoint
    does not fit the module. trust: whether a pickle may run any code.
    """
    checkpoint = open_checkpoint(file, trust)
    values = {name: source_of(checkpoint, name).read() for name in checkpoint.weights}
    own = set(module.state_dict())
    ties = [info.names for info in collect_tensors(module)[0] if info.aliases]
    if not own & set(values) and all(name.startswith("module.") for name in values):
        # saved by DistributedDataParallel
        values = {name.removeprefix("module."): tensor for name, tensor in values.items()}
    try:
        mismatch = module.load_state_dict(values, strict=False, assign=True)
    except RuntimeError as error:
        reason = one_line(error, 300, with_type=True).replace("RuntimeError: ", "")
        raise UserError(f"{file} does not fit {title}: {reason}") from None
    if len(mismatch.missing_keys) == len(own):
        raise UserError(f"{file} has none of the tensors of {title}: it has {', '.join(list(values)[:3])}, ...")
    notices = list(checkpoint.notices)
    if checkpoint.coded:
        notices.append(f"decoded to float32: {plural(len(checkpoint.coded), 'quantized weight')} of {file.name}")
    tied = _tie_again(module, ties, values)
    missing = tuple(name for name in mismatch.missing_keys if name not in tied)
    coverage = Coverage(sum(info.persistent for info in collect_tensors(module)[0]), missing)
    if apart := [names for names in ties if not tied.issuperset(names) and any(name in values for name in names)]:
        notices.append(f"the model ties {' and '.join(apart[0])}, and {file.name} has different values for them")
    if mismatch.unexpected_keys:
        unused = mismatch.unexpected_keys
        notices.append(f"{plural(len(unused), 'tensor')} of {file.name} not used, first {printable(unused[0])}")
    if missing:  # last, since the app shows the last notice
        notices.append(
            f"{plural(len(missing), 'tensor')} of the model not in {file.name}, first {printable(missing[0])}: the model's code "
            "made the values"
        )
    return tuple(notices), coverage, checkpoint.identities


def _tie_again(
    module: nn.Module, ties: Iterable[tuple[str, ...]], values: Mapping[str, torch.Tensor]
) -> frozenset[str]:
    """Make the names of each tied weight (`ties`) share one tensor again, because loading has given each name its own tensor. Names
    that have different `values` in the file stay apart. Returns the names that are tied afterwards.
    """
    tied: set[str] = set()
    for names in ties:
        given = [name for name in names if name in values]
        if not given or not all(torch.equal(values[given[0]], values[name]) for name in given[1:]):
            continue
        one = attrgetter(given[0])(module)
        for name in names:
            parent, _, local = name.rpartition(".")
            tensor_slots(module.get_submodule(parent), local)[local] = one
        tied |= set(names)
    return frozenset(tied)


def load_python(source: Source, options: ModelOptions, device: torch.device, on_step: OnStep) -> LiveModel:
    """Build the model with the user's own class or function. Raises UserError if the user's code fails or does not make an
    `nn.Module`, or if the weights do not fit the module, and NoForward if they take more memory than the options allow.
    """
    on_step(f"importing {source.path or source.module}")
    with quiet():
        made_by, namespace = import_named(source)
        on_step(f"making {source.attribute}")
        with failures_as(UserError, f"{source.title}: calling {source.attribute}() failed", with_type):
            module = made_by if isinstance(made_by, nn.Module) else made_by()
    if not isinstance(module, nn.Module):
        raise UserError(f"{source.title}: {source.attribute}() gave a {type(module).__name__}, not an nn.Module")
    notices: tuple[str, ...] = ()
    coverage: Coverage | None = None
    identities: tuple[FileIdentity, ...] = ()
    if options.weights is not None:
        on_step(f"reading {options.weights}")
        notices, coverage, identities = _load_weights(module, options.weights, options.trust_pickle, source.title)
    require_fit(module, source.title, device, options)
    return LiveModel.wrap(
        module,
        source.title,
        device,
        notices=notices,
        coverage=coverage,
        identities=identities,
        files=(options.weights,) if options.weights is not None and options.weights.is_file() else (),
        folder=source.path.parent if source.path else None,
        example_inputs=getattr(namespace, "example_inputs", None),
        places=places_of(module, device, options),
    )


def import_named(source: Source) -> tuple[Any, ModuleType]:
    """Import the Python file or module of a source. Returns the attribute that the source names, such as a class, and the module.
    Raises UserError if the code fails, or if the module lacks this attribute.
    """
    assert source.attribute is not None
    namespace = _import_file(source.path) if source.path else _import_module(source.module or "")
    if not hasattr(namespace, source.attribute):
        offers = sorted(name for name, value in vars(namespace).items() if _may_make_a_model(value, namespace.__name__))
        hint = f"; it has {', '.join(offers)}" if offers else ""
        raise UserError(f"{source.title}: there is no {source.attribute!r} in {source.path or source.module}{hint}")
    return getattr(namespace, source.attribute), namespace


def _may_make_a_model(value: Any, module: str) -> bool:
    """Return whether a value in a Python file may build a model: it is an `nn.Module`, or it is public, defined in the Python
    module named `module`, and a class of modules or a function without required arguments.
    """
    if isinstance(value, nn.Module):
        return True
    if getattr(value, "__module__", None) != module or getattr(value, "__name__", "_").startswith("_"):
        return False
    if isinstance(value, type):
        return issubclass(value, nn.Module)
    if not inspect.isfunction(value) or value.__name__ == "example_inputs":
        return False
    needed = inspect.Parameter.empty
    return all(
        parameter.default is not needed or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in inspect.signature(value).parameters.values()
    )


def _import_file(path: Path) -> ModuleType:
    name = f"_dtype_engine_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))
    try:
        with failures_as(UserError, f"{path}: importing it failed", with_type):
            spec.loader.exec_module(module)
    except UserError:
        sys.modules.pop(name, None)
        raise
    return module


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with failures_as(UserError, f"{name}: importing it failed", with_type):
        return importlib.import_module(name)
