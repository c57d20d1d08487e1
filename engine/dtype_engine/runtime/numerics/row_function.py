"""Functions that go over rows of outputs on the CPU, made by LLVM for the processor that is there."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dtype_engine.runtime.formats.row_blocks import parallel_map
from dtype_engine.runtime.numerics.machine_code import DTYPES, TEAM, Code

_VALUES_AT_ONCE = 1 << 16


def is_available(*dtypes: torch.dtype) -> bool:
    """Whether code that reads these dtypes can be made on this machine."""
    return set(dtypes) <= set(DTYPES) and _target() is not None


class RowFunction:
    """What was written in `code`, compiled. Threads may call it side by side."""

    def __init__(self, code: Code) -> None:
        self._engine = _compile(code.finish())  # keeps the code in memory
        self._address = self._engine.get_function_address(TEAM)
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)

    def __call__(self, read: Sequence[torch.Tensor], sizes: Sequence[int], written: Sequence[torch.Tensor]) -> None:
        """Go over all rows of the first that is read, [rows, width], with all of torch's threads. Tensors that are written are
        contiguous.
        """
        count, width = read[0].shape
        block = max(1, _VALUES_AT_ONCE // max(1, width))
        given = [*(each.data_ptr() for each in read), *sizes, *(each.data_ptr() for each in written)]
        task = (ctypes.c_int64 * (3 + len(given)))(0, block, count, *given)
        blocks, together = -(-count // block), _team_of_torch()
        threads = min(torch.get_num_threads(), blocks)
        if threads <= 1:
            self._call(ctypes.addressof(task))
        elif together is not None:
            together(self._address, ctypes.addressof(task), threads, 0)
        else:
            parallel_map(lambda numbers: self._call(ctypes.addressof(task)), blocks)


@cache
def _team_of_torch() -> Any:
    """What has a function called by several of the threads that torch's operations are done by, where torch uses OpenMP as GCC has
    it (`GOMP_parallel` of libgomp). After an operation these look for the next one for some milliseconds (4 to 5 on an Intel Xeon),
    each on a core of its own, and other threads would share these cores with them.
    """
    try:
        start = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    start.restype, start.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return start


@cache
def _target() -> Any:
    """What makes code for this processor; None where llvmlite is missing, the system lets nobody make code, or the processor
    would do one of these operations by a call for each value.
    """
    try:
        from llvmlite import binding

        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
    except (ImportError, OSError, AttributeError):
        return None
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    try:
        features = dict(binding.get_host_cpu_features())
    except RuntimeError:  # LLVM does not know them: those that every processor of this name has are taken
        features = {}
    triple = binding.get_default_triple()
    if not triple.startswith(("aarch64", "arm64")):
        if not all(features.get(name) for name in ("avx2", "fma", "f16c")):
            return None
        features["prefer-256-bit"] = False
    told = ",".join(f"{'+' if there else '-'}{name}" for name, there in features.items())
    return binding.Target.from_triple(triple).create_target_machine(
        cpu=binding.get_host_cpu_name(), features=told, opt=2
    )


def _compile(text: str) -> Any:
    """The engine that has the code of a module in memory."""
    from llvmlite import binding

    target = _target()
    module = binding.parse_assembly(text)
    module.verify()
    passes = binding.create_pass_builder(target, binding.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    engine = binding.create_mcjit_compiler(module, target)
    engine.finalize_object()
    return engine
