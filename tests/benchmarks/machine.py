"""The machine that figures are from: kernels differ, and with them every ratio to a pass of torch's."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_UNITS = {
    "amx-bf16": "AMX bfloat16",
    "amx-fp16": "AMX float16",
    "avx512bf16": "AVX512 bfloat16",
    "avx512fp16": "AVX512 float16",
    "avx512f": "AVX512",
    "avx2": "AVX2",
    "bf16": "ARM bfloat16",
    "fullfp16": "ARM float16",
}
"""What LLVM calls the units that decide how long a product of matrices takes."""


def machine() -> str:
    """`AMD EPYC (AVX512 bfloat16, AVX512, AVX2), 2 threads of torch 2.13.0, load 0.1`: the load is of other programs too."""
    import torch
    from llvmlite import binding

    try:
        features = binding.get_host_cpu_features()
        units = [name for feature, name in _UNITS.items() if features.get(feature)]
    except RuntimeError:
        units = []  # LLVM does not know this processor
    threads = f"{torch.get_num_threads()} threads of torch {torch.__version__}"
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{_processor()} ({', '.join(units) or 'no units known'}), {threads}{load}"


def _processor() -> str:
    """The name that the system gives the processor: Linux alone has it in a file."""
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in told.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
