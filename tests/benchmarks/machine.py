"""The machine that figures are from: kernels differ, and with them every ratio to a pass of torch's."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_UNITS = {
    "amx_bf16": "AMX bfloat16",
    "amx_fp16": "AMX float16",
    "avx512_bf16": "AVX512 bfloat16",
    "avx512_fp16": "AVX512 float16",
    "avx512f": "AVX512",
    "avx2": "AVX2",
    "bf16": "ARM bfloat16",
    "asimdhp": "ARM float16",
}
"""What Linux calls the units that decide how long a product of matrices takes."""


def machine() -> str:
    """`AMD EPYC (AVX512 bfloat16, AVX512, AVX2), 2 threads of torch 2.13.0, load 0.1`: the load is of other programs too."""
    import torch

    fields = _processor_fields()
    name = fields.get("model name") or platform.processor() or platform.machine()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    units = [unit for flag, unit in _UNITS.items() if flag in flags] or [torch.backends.cpu.get_cpu_capability()]
    threads = f"{torch.get_num_threads()} threads of torch {torch.__version__}"
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{name} ({', '.join(units)}), {threads}{load}"


def _processor_fields() -> dict[str, str]:
    """What Linux says of the first processor; empty on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    lines = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
