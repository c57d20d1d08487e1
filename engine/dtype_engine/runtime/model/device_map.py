"""Distributes a model over several devices: it decides which module is on which device, and lets activations follow the weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtype_engine.checkpoint.memory_fit import usable_memory
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.options import ModelOptions
from dtype_engine.core.regular_files import read_regular, reading
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes
from dtype_engine.runtime.device import device_count, enough_memory, free_bytes, pick_device
from dtype_engine.runtime.model.containers import with_tensors

Places = Mapping[str, torch.device]
"""The device of each module, keyed by the module's name. A module without an entry is on the device of the module around it."""

_LARGEST = 1 << 26
"""Maximum size of the file of a device map, in bytes."""
_OF_LAYERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""The modules whose children are layers."""


class MovesInputs:
    """A forward pre-hook that moves a module's arguments to the device of its weights."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return with_tensors((args, kwargs), lambda tensor: tensor.to(self.device))


def limit_of(device: torch.device, limits: Mapping[str, int]) -> int | None:
    """Return how many bytes weights may take on a device, or None if there is no limit. limits: the user's limits, keyed by device
    name, such as "cpu", "cuda:0" or "cuda".
    """
    names = ("cpu",) if device.type == "cpu" else (f"{device.type}:{device.index or 0}", device.type)
    return next((limits[name] for name in names if name in limits), None)


def require_fit(module: nn.Module, title: str, device: torch.device, options: ModelOptions) -> None:
    """Raise NoForward if a module takes more memory than the options allow on the device. The module already exists in memory, so
    it can't be run in parts.
    """
    limit = limit_of(device, options.max_memory)
    if limit is None or options.device_map:
        return
    size = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    if size > limit:
        raise NoForward(
            f"{title}: no forward pass: its weights take {human_bytes(size)} and may take {human_bytes(limit)} on {device}; a "
            "module that Python code makes can't be run in parts"
        )


def places_of(module: nn.Module, device: torch.device, options: ModelOptions) -> Places | None:
    """Return on which device each module is to be, or None if all are to be on `device`. `options.device_map` is either "auto",
    which fills all devices of the type of `device` and then the CPU, or the path of a JSON file that maps names of modules to
    devices, as Accelerate writes it. Raises UserError if the file is not such a map, or if the model does not fit on the devices.
    """
    if not options.device_map:
        return None
    if options.device_map == "auto":
        return automatic(module, _budgets(device, options.max_memory))
    return _from_file(module, Path(options.device_map), device)


def _from_file(module: nn.Module, file: Path, device: torch.device) -> Places:
    try:
        with reading(f"the device map {file}"):
            text = read_regular(file, _LARGEST)
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: this is no device map: {error}") from error
    if not isinstance(given, dict):
        raise UserError(
            f'{file}: this is no device map: it must map modules to devices, as in {{"model.layers.0": "cuda:0"}}'
        )
    names = {name for name, _ in module.named_modules()}
    if unknown := [name for name in given if name not in names]:
        raise UserError(f"{file}: the model has no module {printable(unknown[0])}")
    places = {name: pick_device(f"{device.type}:{to}" if type(to) is int else str(to)) for name, to in given.items()}
    for name, child in module.named_modules():
        if any(True for _ in _own(child)) and _place(name, places) is None:
            raise UserError(
                f'{file}: it names no device for {printable(name or "the model")}; "" stands for all other modules'
            )
    return places


def _budgets(device: torch.device, limits: Mapping[str, int]) -> dict[torch.device, int]:
    """Return how many bytes weights may take on each device, in the order in which the devices are filled. If `limits` names
    accelerators, only these are used. Otherwise, weights may take 90% of the free memory of each accelerator.
    """
    every = [torch.device(device.type, index) for index in range(max(1, device_count(device)))]
    chosen = [each for each in every if device.type != "cpu" and str(each) in limits] or every
    budgets = {}
    for each in chosen:
        free = free_bytes(each)
        most = usable_memory(limits) if free is None else int(0.9 * free)
        budgets[each] = limits.get(str(each), limits.get(each.type, most))
    cpu = torch.device("cpu")
    return budgets if device.type == "cpu" else budgets | {cpu: usable_memory(limits)}


def automatic(module: nn.Module, budgets: Mapping[torch.device, int]) -> Places:
    """Return the device of each module. The devices are filled one after the other in the order of the modules, as Accelerate's
    `infer_auto_device_map` does. A module that does not fit into the remaining memory of a device is divided into its submodules. A
    layer, a child of a module in `_OF_LAYERS`, is never divided, because its code may add the outputs of two submodules, which
    would then be on different devices.

    budgets: the most bytes of weights for each device, in the order in which the devices are filled. Raises UserError if the model
    does not fit.
    """
    places: dict[str, torch.device] = {}
    counted: set[int] = set()
    free = list(budgets.items())

    def place(name: str, child: nn.Module, whole: bool) -> None:
        tensors = {id(tensor): tensor.nbytes for each in child.modules() for _, tensor in _own(each)}
        size = sum(nbytes for key, nbytes in tensors.items() if key not in counted)
        children = dict(child.named_children())
        parts = not whole and children and not any(True for _ in _own(child))
        while size > free[0][1]:
            if parts:
                for part, inner in children.items():
                    place(f"{name}.{part}" if name else part, inner, isinstance(child, _OF_LAYERS))
                return
            if len(free) == 1:
                given = ", ".join(f"{each} {human_bytes(most)}" for each, most in budgets.items())
                raise UserError(
                    f"{name or 'the model'}: its {human_bytes(size)} do not fit into what is left of {given}"
                )
            free.pop(0)
        device, left = free[0]
        free[0] = device, left - size
        counted.update(tensors)
        places[name] = device

    place("", module, False)
    accelerators = [str(device) for device in budgets if device.type != "cpu"]
    if accelerators and all(device.type == "cpu" for device in places.values()):
        raise UserError(
            f"no part of the model that can be on a device of its own fits on {', '.join(accelerators)}; give a file that says "
            "where each module is to be instead of auto"
        )
    return places


def distribute(module: nn.Module, places: Places, main: torch.device) -> None:
    """Move the modules to their devices (`places`). From then on, a module moves its arguments to the device of its weights, and
    the model moves its output to `main`. A weight that several modules share is on the device of the first of them, together with
    the other tensors of these modules. Raises UserError if the memory of a device is too small.
    """
    own = {name: [id(tensor) for _, tensor in _own(child)] for name, child in module.named_modules()}
    together: dict[int, list[int]] = {}  # tensors that are on one device because a module computes with both
    for ids in own.values():
        group = list(dict.fromkeys(each for key in ids for each in together.get(key, [key])))
        together |= dict.fromkeys(group, group)
    where: dict[int, torch.device] = {}
    for name, ids in own.items():
        for key in ids:
            if key not in where:
                where |= dict.fromkeys(together[key], _place(name, places) or main)
    of_module = {name: where[ids[0]] for name, ids in own.items() if ids}

    def move(name: str, child: nn.Module) -> None:
        inside = f"{name}." if name else ""
        devices = {device for each, device in of_module.items() if each == name or each.startswith(inside)}
        if len(devices) == 1 and type(child).forward is not nn.Module.forward:  # a list of modules is never called
            (device,) = devices
            with enough_memory(name or "the model", device):
                child.to(device)
            child.register_forward_pre_hook(MovesInputs(device), with_kwargs=True)
            return
        for local, tensor in _own(child):
            moved = tensor.to(of_module[name])
            setattr(child, local, nn.Parameter(moved, False) if isinstance(tensor, nn.Parameter) else moved)
        for part, inner in child.named_children():
            move(f"{inside}{part}", inner)

    move("", module)
    to_main: Callable[..., Any] = lambda *called: with_tensors(called[-1], lambda tensor: tensor.to(main))  # noqa: E731
    module.register_forward_hook(to_main)


def _place(name: str, places: Places) -> torch.device | None:
    while name and name not in places:
        name = name.rpartition(".")[0]
    return places.get(name)


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)
