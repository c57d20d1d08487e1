"""An accelerator "fake" in pure Python: it has its own memory and random numbers, and lacks float64 and kernels for float8.

Its memory is CPU memory that only this module reaches, by the storage of a tensor, so that views, `tensor.data = ...` and writes
behave as on a device. Every operation goes through `_run`, which refuses tensors of another device, as torch's accelerators do.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._C import DispatchKey, _acc
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fake"
_DLPACK_EXTENSION = 12
"""The kind of device in DLPack that is torch's PrivateUse1."""
_DEVICE_TYPE_OFFSET = 8
"""Where the kind of device stands in a `DLTensor`, in bytes. Its number follows."""
_MOVES = frozenset(
    {
        "empty", "empty_strided", "_copy_from", "_copy_from_and_resize", "set_", "as_strided", "view", "_local_scalar_dense",
        "zero_", "fill_", "index_select", "slice", "select", "transpose", "permute", "expand", "cat", "resize_", "unfold",
        "copy_", "alias", "detach", "squeeze", "unsqueeze", "_reshape_alias", "split", "split_with_sizes", "t", "clone",
        "diagonal", "_unsafe_view", "record_stream",
    }
)  # fmt: skip
"""Operations that move bytes, and so work for every dtype but float64."""
_PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_overrideable", "_grouped_mm", "addmv", "mv", "dot"}
)
"""Products, whose last digits are not those of the CPU's kernels if `FakeDevice.own_digits` is True."""
_INDEXED = frozenset({"index", "index_put", "index_put_", "_unsafe_index"})
"""Operations that take indexes on the CPU, as CUDA's do."""
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
        self.allocated_on: Counter[int] = Counter()
        self.peak_on: Counter[int] = Counter()
        self.synchronized = 0
        self.count = 1
        """How many devices there are."""
        self.limits: dict[int, int] = {}
        """The size of the memory of single devices in bytes, keyed by number."""
        self.own_digits = False
        """Whether last digits differ from those of the CPU, as on every real device: products are summed in a wider dtype, and a
        division by a number multiplies by its reciprocal, as CUDA does.
        """
        self.lacks = {torch.float64, torch.complex128}
        """The dtypes that it can't even hold."""
        self.computes = {torch.float32, torch.float16, torch.bfloat16, torch.float64}
        """The floating dtypes with kernels for more than moving bytes."""
        self.missing: set[tuple[str, torch.dtype]] = set()
        """The operations, by torch's name, that have no kernel for a dtype, as no device has all of them."""
        self.generator = torch.Generator()
        self.queued: Callable[[], list[Callable[[], object]] | None] = lambda: None
        """Returns the copies that the current stream has not made yet, or None if it copies at once. See `fake_streams.py`."""
        self.lent = 0
        """How many tensors another stream than their own uses, as `record_stream` tells."""

    @property
    def allocated(self) -> int:
        """The bytes that tensors take on the first device."""
        return self.allocated_on[0]

    @property
    def limit(self) -> int | None:
        """The size of the first device's memory in bytes."""
        return self.limits.get(0)

    @limit.setter
    def limit(self, size: int | None) -> None:
        self.limits = {} if size is None else {0: size}

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def device_count(self) -> int:
        return self.count

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
        return self.allocated_on[_index(device)]

    def memory_reserved(self, device: Any = None) -> int:
        return self.allocated_on[_index(device)]

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.peak_on[_index(device)]

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.peak_on[_index(device)] = self.allocated_on[_index(device)]

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        total = self.limits.get(_index(device), 1 << 34)
        return total - self.allocated_on[_index(device)], total


def _index(device: Any) -> int:
    return (torch.device(device).index if device is not None else None) or 0


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
        ("_thnn_fused_lstm_cell_backward_impl", _lstm_cell_backward),
        ("_thnn_fused_gru_cell_backward", _gru_cell_backward),
    ):  # what torch asks a device to bring
        _own.impl(name, partial(_run, operation), "PrivateUse1")
    storages: Any = torch.UntypedStorage
    clone, cpu = storages.clone, storages.cpu  # what `copy.deepcopy` and `torch.save` call: these are no operations
    storages.clone = lambda own: _new_storage(_memory[own._cdata].clone()) if own.device.type == NAME else clone(own)
    storages.cpu = lambda own: _memory[own._cdata].clone() if own.device.type == NAME else cpu(own)
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
    reset = (r + reset).sigmoid()
    found = (n + reset * new).tanh()
    return found * (1 - kept) + kept * hidden, torch.cat([reset, kept, found, hidden, new], 1)


def _lstm_cell_backward(
    of_hidden: torch.Tensor | None,
    of_cell: torch.Tensor | None,
    before: Any,
    cell: Any,
    gates: torch.Tensor,
    bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    enter, forget, new, leave = gates.chunk(4, 1)
    enter, forget, new, leave = enter.sigmoid(), forget.sigmoid(), new.tanh(), leave.sigmoid()
    total, out = (torch.zeros_like(cell) if of_cell is None else of_cell), torch.zeros_like(cell)
    if of_hidden is not None:
        total, out = total + of_hidden * leave * (1 - cell.tanh() ** 2), of_hidden * cell.tanh()
    slopes = [enter * (1 - enter), forget * (1 - forget), 1 - new**2, leave * (1 - leave)]
    of_gates = torch.cat(
        [a * b for a, b in zip((total * new, total * before, total * enter, out), slopes, strict=True)], 1
    )
    return of_gates, total * forget, of_gates.sum(0)


def _gru_cell_backward(of_hidden: torch.Tensor, workspace: torch.Tensor, bias: bool) -> tuple[torch.Tensor, ...]:
    reset, kept, found, hidden, new = workspace.chunk(5, 1)
    of_kept, of_found = of_hidden * (hidden - found) * kept * (1 - kept), of_hidden * (1 - kept) * (1 - found**2)
    of_reset = of_found * new * reset * (1 - reset)
    of_gates = [torch.cat([of_reset, of_kept, each], 1) for each in (of_found, of_found * reset)]
    return (*of_gates, of_hidden * kept, *(each.sum(0) for each in of_gates))


def _free(storage: int, cpu: int, index: int, size: int) -> None:
    device.allocated_on[index] -= size  # what was counted: the storage on the CPU may have been resized
    del _memory[storage]
    _known.pop(cpu, None)


def _from_cpu(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """A tensor of a device over a CPU tensor's memory."""
    capsule = torch.utils.dlpack.to_dlpack(tensor)
    address = _PointerOf(capsule, b"dltensor") + _DEVICE_TYPE_OFFSET
    (ctypes.c_int32 * 2).from_address(address)[:] = _DLPACK_EXTENSION, index
    made: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
    return made


def _new_storage(cpu: Any, index: int = 0) -> Any:
    """A storage of a device that stands for a CPU storage."""
    size = cpu.nbytes()
    limit = device.limits.get(index)
    if limit is not None and device.allocated_on[index] + size > limit:
        raise torch.OutOfMemoryError(f"{NAME} out of memory. Tried to allocate {size} bytes")
    over = (
        torch.empty(1, dtype=torch.uint8) if not size else torch.empty(0, dtype=torch.uint8).set_(cpu, 0, (size,), (1,))
    )
    storage = _from_cpu(over, index).untyped_storage()
    _memory[storage._cdata] = cpu
    _known[cpu._cdata] = weakref.ref(storage)
    weakref.finalize(storage, _free, storage._cdata, cpu._cdata, index, size)
    device.allocated_on[index] += size
    device.peak_on[index] = max(device.peak_on[index], device.allocated_on[index])
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


def _on_device(result: torch.Tensor, index: int) -> torch.Tensor:
    """A tensor of a device for a result on the CPU: a view, if the result is a view of such a tensor."""
    cpu = result.untyped_storage()
    known = _known.get(cpu._cdata)
    storage = known() if known is not None else None
    if storage is None:
        storage = _new_storage(cpu, index)
    index = storage.device.index
    empty = torch.empty(1, dtype=result.dtype)
    tensor = _acc.create_empty_tensor([0], result.dtype) if not index else _from_cpu(empty, index)  # type: ignore[attr-defined]
    return _point(tensor, storage, result)


def _refuse(name: str, own: list[torch.Tensor], others: list[torch.Tensor], wanted: Any) -> None:
    places = [str(tensor.device) for tensor in (*own, *others) if tensor.ndim or tensor.device.type == NAME]
    if own and len(set(places)) > 1 and not name.startswith("_copy_from"):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found {' and '.join(sorted(set(places)))} ({name})"
        )
    lacking = ({wanted} | {tensor.dtype for tensor in own}) & device.lacks
    if lacking:
        raise TypeError(f"the device has no {str(lacking.pop()).removeprefix('torch.')} ({name})")
    for tensor in own:
        narrow = tensor.dtype not in device.computes and name not in _MOVES and tensor.is_floating_point()
        if narrow or (name, tensor.dtype) in device.missing:
            known_as = torch.empty(0, dtype=tensor.dtype).type().removeprefix("torch.").removesuffix("Tensor")
            raise NotImplementedError(f"\"{name}_{NAME}\" not implemented for '{known_as}'")


def _replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value of arguments or results, with `change` of everything in its lists, tuples and dicts."""
    if type(value) in (list, tuple):
        return type(value)([_replaced(each, change) for each in value])
    return {key: _replaced(each, change) for key, each in value.items()} if type(value) is dict else change(value)


def _run(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any operation on the CPU tensors that its arguments stand for."""
    schema = getattr(operation, "_schema", None)
    name = operation.__name__ if schema is None else schema.name.split("::")[1]
    if name == "set_" and len(args) > 2 and isinstance(args[1], torch.UntypedStorage):
        set_: Any = torch.ops.aten.set_.source_Storage_storage_offset
        return set_._op_dk(DispatchKey.CPU, *args)
    own: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    index = 0

    def to_cpu(value: Any) -> Any:
        nonlocal index
        if isinstance(value, torch.device) and value.type == NAME:
            index = value.index or 0
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor):
            return value
        if value.device.type != NAME:
            others.append(value)
            return value
        own.append(value)
        cpu = _on_cpu(value)
        pairs[id(cpu)] = value, cpu
        return cpu

    args, kwargs = _replaced(args, to_cpu), _replaced(kwargs, to_cpu)
    if own:
        index = own[0].device.index
    _refuse(name, own, [] if name in _INDEXED else others, kwargs.get("dtype"))
    queued = device.queued()
    if name == "_copy_from" and queued is not None and others and args[2]:
        args[1].fill_(torch.nan if args[1].is_floating_point() else 0)
        queued.append(partial(args[1].copy_, args[0]))
        return next(iter(pairs.values()))[0]
    while queued and name != "empty_strided":  # which makes room for a copy
        queued.pop(0)()
    if name == "record_stream":
        device.lent += 1
        return None
    if name in ("_copy_from", "_copy_from_and_resize"):
        copied = args[1].copy_(args[0])
        return pairs.get(id(copied), (copied,))[0]
    if schema is not None and any(type(each) in (int, float, bool) for each in args):
        args = tuple(
            torch.tensor(each)
            if type(each) in (int, float, bool) and isinstance(taken.type, torch.TensorType)
            else each
            for each, taken in zip(args, schema.arguments, strict=False)
        )
    if name == "histc" and not args[0].is_floating_point():
        result = operation(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)  # CUDA has it for integers as well
    elif device.own_digits and name in _PRODUCTS and "out" not in kwargs and args[0].is_floating_point():
        result = _with_own_digits(operation, args, kwargs)
    elif device.own_digits and name in ("div", "div_") and len(args) == 2 and not args[1].ndim and len(own) == 1:
        multiply = torch.ops.aten.mul.Tensor if name == "div" else torch.ops.aten.mul_.Tensor
        result = multiply(args[0], args[1].double().reciprocal().to(args[0].dtype))  # CUDA does so with a number
    elif torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        result = operation(*args, **kwargs)
    else:
        result = _drawn(operation, args, kwargs)
    for tensor, cpu in pairs.values():
        if cpu.shape != tensor.shape:  # a destination that was resized
            _point(tensor, _new_storage(cpu.untyped_storage(), index), cpu)
    if isinstance(result, torch.Tensor):
        return _answered(result, pairs, index)
    return _replaced(result, lambda each: _answered(each, pairs, index) if isinstance(each, torch.Tensor) else each)


def _with_own_digits(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Run a product in a wider dtype than that of its arguments."""
    dtype = args[0].dtype
    if any(isinstance(each, torch.Tensor) and each.is_floating_point() and each.dtype != dtype for each in args):
        return operation(*args, **kwargs)  # type: ignore[no-any-return]  # which refuses several dtypes
    wide = torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32
    widened = _replaced(
        args, lambda each: each.to(wide) if isinstance(each, torch.Tensor) and each.is_floating_point() else each
    )
    found: torch.Tensor = operation(*widened, **kwargs).to(dtype)
    return found


def _drawn(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation with the device's random numbers in place of the CPU's."""
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(device.generator.get_state())
    try:
        return operation(*args, **kwargs)
    finally:
        device.generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


def _answered(result: torch.Tensor, pairs: dict[int, tuple[torch.Tensor, torch.Tensor]], index: int) -> torch.Tensor:
    return pairs[id(result)][0] if id(result) in pairs else _on_device(result, index)
