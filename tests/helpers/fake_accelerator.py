"""An accelerator "fake" in pure Python, for a process of its own: it has its own memory, and lacks float64 and kernels for float8.

Its memory is CPU memory that only this module reaches, by the storage of a tensor, so that views, `tensor.data = ...` and writes
behave as on a device. Every operation goes through `_run`, which refuses tensors of another device, as torch's accelerators do.
"""

from __future__ import annotations

import ctypes
import weakref
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
_COMPUTES = {torch.float32, torch.float16, torch.bfloat16}
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
_memory: dict[int, Any] = {}
"""The CPU storage of each of the device's storages, by the address of the latter."""
_known: dict[int, Any] = {}
"""A weak reference to the device's storage, by the address of the CPU storage."""


class FakeDevice:
    """What `torch.get_device_module("fake")` returns."""

    def __init__(self) -> None:
        self.allocated = self.peak = self.synchronized = 0
        self.limit: int | None = None
        """The size of its memory in bytes."""

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
        torch.default_generator.manual_seed(seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.default_generator.set_state(state)

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
    return library


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
    if wanted == torch.float64 or any(tensor.dtype == torch.float64 for tensor in own):
        raise TypeError(f"the device has no float64 ({name})")
    for tensor in own:
        if tensor.is_floating_point() and tensor.dtype not in _COMPUTES and name not in _MOVES:
            raise NotImplementedError(f'"{name}_{NAME}" not implemented for {tensor.dtype}')


def _run(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any operation on the CPU tensors that its arguments stand for."""
    name = operation._schema.name.split("::")[1]
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
    args = tuple(
        torch.tensor(each)
        if isinstance(each, (int, float, bool)) and isinstance(taken.type, torch.TensorType)
        else each
        for each, taken in zip(args, operation._schema.arguments, strict=False)
    )
    result = operation(*args, **kwargs)
    for tensor, cpu in pairs.values():
        if cpu.shape != tensor.shape:  # a destination that was resized
            _point(tensor, _new_storage(cpu.untyped_storage()), cpu)
    flat, spec = tree_flatten(result)
    return tree_unflatten([_answered(each, pairs) if isinstance(each, torch.Tensor) else each for each in flat], spec)


def _answered(result: torch.Tensor, pairs: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    return pairs[id(result)][0] if id(result) in pairs else _on_device(result)
