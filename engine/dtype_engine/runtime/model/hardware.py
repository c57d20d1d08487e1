"""The hardware that torch uses, for bug reports."""

from __future__ import annotations

import torch

from dtype_engine.runtime.device import accelerator_names


def hardware() -> dict[str, str]:
    """Return the instruction set of torch's CPU kernels, the number of threads and the names of the accelerators, as torch
    reports them.
    """
    return {
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "accelerator": ", ".join(accelerator_names()) or "none",
    }
