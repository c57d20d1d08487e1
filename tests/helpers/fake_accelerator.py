"""An accelerator "fake" in pure Python: it has its own memory and random numbers, and lacks float64 and kernels for float8.

Its memory is CPU memory that only this module reaches, by the storage of a tensor, so that views, `tensor.data = ...` and writes
behave as on a device. Every operation goes through `_run`, which refuses tensors of another device, as torch's accelerators do.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import partial
from typing import Any

import torch
from torch._C import DispatchKey, _acc
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fake"
_DLPACK_EXTENSION = 12
"""The kind of device in DLPack that is torch's PrivateUse1."""
_DEVICE_TYPE_OFFSET = 8
"""Where the kind of device stands in a `DLTensor`, in bytes."""
_MOVES = frozenset(
    {
        "empty", "empty_strided", "_copy_from", "_copy_from_and_resize", "set_", "as_strided", "view", "_local_scalar_dense",
        "zero_", "fill_", "index_select", "slice", "select", "transpose", "permute", "expand", "cat", "resize_", "unfold",
        "copy_", "alias", "detach", "squeeze", "unsqueeze", "_reshape_alias", "split", "split_with_sizes", "t", "clone",
        "diagonal", "_unsafe_view",
    }
)  # fmt: skip
"""Operations that move bytes, and so work for every dtype but float64."""
_PointerOf = ctypes.pythonapi.PyCapsule_GetPointer
_PointerOf.restype, _PointerOf.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_own = torch.library.Library("aten", "IMPL")
_memory: dict[int, Any] = {}
"""The CPU storage of each of the device's storages, by the address of the latter."""
_known: dict[int, Any] = {}
"""A weak reference to the device's storage, by the address of the CPU storage."""


class FakeDevice:
    """What `torch.get_device_module("fake")` returns. A test may change what it has, and puts it back."""

    def __init__(self) -> None:
        self.allocated = self.peak = self.synchronized = 0
        self.limit: int | None = None
        """The size of its memory in bytes."""
        self.lacks = {torch.float64, torch.complex128}
        """The dtypes that it can't even hold."""
        self.computes = {torch.float32, torch.float16, torch.bfloat16, torch.float64}
        """The floating dtypes with kernels for more than moving bytes."""
        self.missing: set[tuple[str, torch.dtype]] = set()
        """The operations, by torch's name, that have no kernel for a dtype, as no device has all of them."""
        self.generator = torch.Generator()

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self.generator.set_state(state)

    def synchronize(self, device: Any = None) -> None:
        self.synchronized += 1

    def memory_allocated(self, device: Any = None) -> int:
        return self.allocated

    def memory_reserved(self, device: Any = None) -> int:
        return self.allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.peak = self.allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        total = self.limit or 1 << 34
        return total - self.allocated, total


class _Hooks(_acc.PrivateUse1Hooks):  # type: ignore[misc, name-defined]
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, device: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


device = FakeDevice()


def register() -> Any:
    """Make torch know the device. Keep the result: the device works as long as it lives."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=device, hook=_Hooks())
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run, "PrivateUse1")
    for name, operation in (
        ("convolution_overrideable", torch.ops.aten.convolution.default),
        ("convolution_backward_overrideable", _convolution_backward),
        ("_thnn_fused_lstm_cell", _lstm_cell),
        ("_thnn_fused_gru_cell", _gru_cell),
    ):  # what torch asks a device to bring
        _own.impl(name, partial(_run, operation), "PrivateUse1")
    storages: Any = torch.UntypedStorage
    clone = storages.clone  # what `copy.deepcopy` of a tensor calls: it is no operation
    storages.clone = lambda own: _new_storage(_memory[own._cdata].clone()) if own.device.type == NAME else clone(own)
    return library


def _convolution_backward(gradient: Any, input: Any, weight: Any, *rest: Any) -> Any:
    *how, wanted = rest
    return torch.ops.aten.convolution_backward.default(gradient, input, weight, [weight.shape[0]], *how, wanted)


def _lstm_cell(
    of_input: torch.Tensor, of_hidden: torch.Tensor, cell: torch.Tensor, *biases: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gates = sum((bias for bias in biases if bias is not None), of_input + of_hidden)
    enter, forget, new, leave = gates.chunk(4, 1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell, gates


def _gru_cell(
    of_input: torch.Tensor, of_hidden: torch.Tensor, hidden: torch.Tensor, *biases: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if biases and biases[0] is not None and biases[1] is not None:
        of_input, of_hidden = of_input + biases[0], of_hidden + biases[1]
    (r, z, n), (reset, update, new) = of_input.chunk(3, 1), of_hidden.chunk(3, 1)
    kept = (z + update).sigmoid()
    return (n + (r + reset).sigmoid() * new).tanh() * (1 - kept) + kept * hidden, of_input


def _free(storage: int, cpu: int) -> None:
    device.allocated -= _memory.pop(storage).nbytes()
    _known.pop(cpu, None)


def _new_storage(cpu: Any) -> Any:
    """A storage of the device that stands for a CPU storage."""
    size = cpu.nbytes()
    if device.limit is not None and device.allocated + size > device.limit:
        raise torch.OutOfMemoryError(f"{NAME} out of memory. Tried to allocate {size} bytes")
    over = (
        torch.empty(1, dtype=torch.uint8) if not size else torch.empty(0, dtype=torch.uint8).set_(cpu, 0, (size,), (1,))
    )
    capsule = torch.utils.dlpack.to_dlpack(over)
    tensor = _PointerOf(capsule, b"dltensor")
    ctypes.c_int32.from_address(tensor + _DEVICE_TYPE_OFFSET).value = _DLPACK_EXTENSION
    storage = torch.utils.dlpack.from_dlpack(capsule).untyped_storage()
    _memory[storage._cdata] = cpu
    _known[cpu._cdata] = weakref.ref(storage)
    weakref.finalize(storage, _free, storage._cdata, cpu._cdata)
    device.allocated += size
    device.peak = max(device.peak, device.allocated)
    return storage


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor that a tensor of the device stands for."""
    cpu = _memory[tensor.untyped_storage()._cdata]
    return torch.empty(0, dtype=tensor.dtype).set_(cpu, tensor.storage_offset(), tensor.shape, tensor.stride())


def _point(tensor: torch.Tensor, storage: Any, at: torch.Tensor) -> torch.Tensor:
    set_: Any = torch.ops.aten.set_.source_Storage_storage_offset
    found: torch.Tensor = set_._op_dk(
        DispatchKey.CPU, tensor, storage, at.storage_offset(), list(at.shape), list(at.stride())
    )
    return found


def _on_device(result: torch.Tensor) -> torch.Tensor:
    """A tensor of the device for a result on the CPU: a view, if the result is a view of such a tensor."""
    cpu = result.untyped_storage()
    known = _known.get(cpu._cdata)
    storage = known() if known is not None else None
    tensor = _acc.create_empty_tensor([0], result.dtype)  # type: ignore[attr-defined]
    return _point(tensor, storage if storage is not None else _new_storage(cpu), result)


def _refuse(name: str, own: list[torch.Tensor], others: list[torch.Tensor], wanted: Any) -> None:
    if own and others and not name.startswith("_copy_from"):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found {NAME} and {others[0].device} ({name})"
        )
    lacking = ({wanted} | {tensor.dtype for tensor in own}) & device.lacks
    if lacking:
        raise TypeError(f"the device has no {str(lacking.pop()).removeprefix('torch.')} ({name})")
    for tensor in own:
        narrow = tensor.is_floating_point() and tensor.dtype not in device.computes and name not in _MOVES
        if narrow or (name, tensor.dtype) in device.missing:
            known_as = torch.empty(0, dtype=tensor.dtype).type().removeprefix("torch.").removesuffix("Tensor")
            raise NotImplementedError(f"\"{name}_{NAME}\" not implemented for '{known_as}'")


def _run(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any operation on the CPU tensors that its arguments stand for."""
    schema = getattr(operation, "_schema", None)
    name = operation.__name__ if schema is None else schema.name.split("::")[1]
    if name == "set_" and len(args) > 2 and isinstance(args[1], torch.UntypedStorage):
        set_: Any = torch.ops.aten.set_.source_Storage_storage_offset
        return set_._op_dk(DispatchKey.CPU, *args)
    flat, spec = tree_flatten((args, kwargs))
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    own = [tensor for tensor in tensors if tensor.device.type == NAME]
    _refuse(name, own, [each for each in tensors if each.device.type != NAME and each.ndim], kwargs.get("dtype"))
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for index, each in enumerate(flat):
        if isinstance(each, torch.Tensor) and each.device.type == NAME:
            cpu = flat[index] = _on_cpu(each)
            pairs[id(cpu)] = each, cpu
        elif isinstance(each, torch.device) and each.type == NAME:
            flat[index] = torch.device("cpu")
    args, kwargs = tree_unflatten(flat, spec)
    if name in ("_copy_from", "_copy_from_and_resize"):
        copied = args[1].copy_(args[0])
        return pairs.get(id(copied), (copied,))[0]
    if schema is not None:
        args = tuple(
            torch.tensor(each)
            if isinstance(each, (int, float, bool)) and isinstance(taken.type, torch.TensorType)
            else each
            for each, taken in zip(args, schema.arguments, strict=False)
        )
    if name == "histc" and not args[0].is_floating_point():
        result = operation(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)  # CUDA has it for integers as well
    elif torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        result = operation(*args, **kwargs)
    else:
        result = _drawn(operation, args, kwargs)
    for tensor, cpu in pairs.values():
        if cpu.shape != tensor.shape:  # a destination that was resized
            _point(tensor, _new_storage(cpu.untyped_storage()), cpu)
    flat, spec = tree_flatten(result)
    return tree_unflatten([_answered(each, pairs) if isinstance(each, torch.Tensor) else each for each in flat], spec)


def _drawn(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation with the device's random numbers in place of the CPU's."""
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(device.generator.get_state())
    try:
        return operation(*args, **kwargs)
    finally:
        device.generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


def _answered(result: torch.Tensor, pairs: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    return pairs[id(result)][0] if id(result) in pairs else _on_device(result)
