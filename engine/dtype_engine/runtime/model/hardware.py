"""The hardware that torch uses, for bug reports."""

from __future__ import annotations

import torch


def hardware() -> dict[str, str]:
    """Return the instruction set of torch's CPU kernels, the number of threads and the names of the GPUs, as torch reports them."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "GPU": ", ".join(gpus) or "none",
    }
