"""The device that models run on: the CPU, or the accelerator (CUDA, MPS, XPU, ...) that `torch.accelerator` finds."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from dtype_engine.core.errors import UserError
from dtype_engine.core.replaced import replaced
from dtype_engine.core.system_memory import memory_budget


def pick_device(wanted: str) -> torch.device:
    """Return the device that a user names, such as "cpu", "cuda:1" or "mps". For "auto", return this machine's accelerator if it
    supports float64, as CUDA does, and otherwise the CPU. Raises UserError if this machine lacks the device.
    """
    here = torch.accelerator.current_accelerator(check_available=True)
    if wanted == "auto":
        return here if here is not None and has_float64(here) else torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        device = torch.device("meta")
    kinds = ["cpu", *([here.type] if here is not None else [])]
    if device.type not in kinds:
        raise UserError(
            f"no device {wanted!r} here: torch {torch.__version__} has {' and '.join(kinds)} on this machine; use --device auto or "
            f"{' or '.join(kinds)}"
        )
    count = device_count(device) or 1
    if device.index is not None and device.index >= count:
        raise UserError(f"no device {wanted!r} here: {device.type} has {count}, which are counted from 0")
    return device


def device_count(device: torch.device) -> int:
    """Return how many accelerators of a device's type this machine has: 0 for the CPU."""
    return 0 if device.type == "cpu" else torch.accelerator.device_count()


def accelerator_names() -> list[str]:
    """Return the product names of all accelerators on this machine, ordered by device index."""
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None:
        return []
    named = getattr(torch.get_device_module(here), "get_device_name", lambda index: here.type)
    return [named(index) for index in range(device_count(here))]


def hardware() -> dict[str, str]:
    """Return facts for bug reports: the instruction set of torch's CPU kernels, torch's thread count, and all accelerators."""
    return {
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "accelerator": ", ".join(accelerator_names()) or "none",
    }


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished the work that was queued on it."""
    if device.type == "mps":
        torch.mps.synchronize()
    else:
        _ask(device, "synchronize")


def reset_peak(device: torch.device) -> None:
    """Start a new measurement of the peak memory that tensors take on a device, if the device reports this peak."""
    _ask(device, "reset_peak_memory_stats")


def allocated_bytes(device: torch.device) -> tuple[int | None, int | None, int | None]:
    """Return three numbers of bytes on a device: (what tensors take, what torch has reserved, the peak of what tensors took). Each
    is None if the device, such as the CPU, does not report it.
    """
    allocated = _ask(device, "memory_allocated")
    if allocated is None and device.type == "mps":
        return torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory(), None
    return allocated, _ask(device, "memory_reserved"), _ask(device, "max_memory_allocated")


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a device's memory, or None for the CPU and for a device that does not report it."""
    found = _ask(device, "mem_get_info")
    return None if found is None else found[0]


def total_bytes(device: torch.device) -> int | None:
    """Return the bytes of a device's memory, or None for the CPU and for a device that does not report it."""
    found = _ask(device, "mem_get_info")
    return None if found is None else found[1]


def cache_budget(device: torch.device) -> int:
    """Return how many bytes a cache of recomputable values may take: `memory_budget()`, but on an accelerator at most a quarter of
    its free memory.
    """
    free = free_bytes(device)
    return memory_budget() if free is None else min(memory_budget(), free // 4)


@contextmanager
def enough_memory(what: str, device: torch.device, raised: type[UserError] = UserError) -> Iterator[None]:
    """Convert torch's out-of-memory errors in the `with` block to `raised` errors whose message names `what` and the device."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason, instead = str(error).split(". ")[0], "" if device.type == "cpu" else "; use --device cpu"
        raise raised(f"{what}: not enough memory on {device} ({reason}){instead}") from error


def _ask(device: torch.device, name: str) -> Any:
    """Call the function `name` of a device's torch module, such as `torch.cuda`. Returns None for the CPU or a missing function."""
    function = None if device.type == "cpu" else getattr(torch.get_device_module(device), name, None)
    return None if function is None else function(device)


@functools.cache
def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64. Apple's MPS does not."""
    try:
        return bool((torch.ones(1, device=device).to(torch.float64) * 2).sum() == 2)
    except (TypeError, RuntimeError):
        return False


def has_streams(device: torch.device) -> bool:
    """Return whether a device copies and computes at the same time, in different streams. The CPU and Apple's MPS do not."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "Stream")


def copied_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device. If the device has streams, a tensor on the CPU is copied asynchronously from pinned memory,
    which torch keeps until the copy ends.
    """
    if tensor.device.type != "cpu" or not has_streams(device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def for_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if its device supports float64, and otherwise a copy on the CPU."""
    return tensor if tensor.device.type == "cpu" or has_float64(tensor.device) else tensor.cpu()


def divide(values: torch.Tensor, number: float) -> torch.Tensor:
    """Return values / number, correctly rounded. `number` is converted to a tensor first, because CUDA multiplies by the
    reciprocal of a Python number, and so rounds twice.
    """
    return values / torch.full((), number, dtype=values.dtype, device=values.device)


def random_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of torch's random number generators: the CPU's and, if `device` is an accelerator, its own."""
    states = [torch.default_generator.get_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def set_random_states(device: torch.device, states: list[torch.Tensor]) -> None:
    """Restore the states that `random_states(device)` returned."""
    torch.default_generator.set_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Seed torch's random number generators with 0 for the `with` block. The previous states are restored afterwards."""
    states = random_states(device)
    try:
        # Not torch.manual_seed: before CUDA is initialised, it would queue one more call in every pass.
        torch.default_generator.manual_seed(0)
        if device.type != "cpu":
            with torch.accelerator.device_index(device.index):
                torch.get_device_module(device).manual_seed(0)
        yield
    finally:
        set_random_states(device, states)


@contextmanager
def differentiable_recurrence(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Make recurrent layers such as `nn.LSTM` differentiable in the `with` block, although `module` is in evaluation mode. cuDNN
    can't differentiate them in this mode, so torch's own kernels run instead.
    """
    recurrent = device.type == "cuda" and any(isinstance(each, nn.RNNBase) for each in module.modules())
    with replaced(torch.backends.cudnn, "enabled", False) if recurrent else nullcontext():
        yield


@contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """Make torch compute products and convolutions of float32 tensors in full float32 during the `with` block. By default, torch
    uses TF32, with a mantissa of 10 bits, for convolutions on CUDA. A program may also have allowed bfloat16 for matrix products.
    """
    matmul = torch.get_float32_matmul_precision()
    cudnn: Any = torch.backends.cudnn
    of_cudnn = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    try:
        if matmul != "highest":
            torch.set_float32_matmul_precision("highest")
        if device.type == "cuda":
            cudnn.allow_tf32 = False  # for model code that reads this flag; torch itself uses the next line
            cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "ieee"
        yield
    finally:
        if matmul != "highest":
            torch.set_float32_matmul_precision(matmul)
        if device.type == "cuda":
            cudnn.allow_tf32 = of_cudnn == ("tf32", "tf32")
            cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = of_cudnn
