"""What torch computes on, for the versions in a report of a fault."""

from __future__ import annotations

import torch


def hardware() -> dict[str, str]:
    """The kernels of the processor, the threads and the GPUs, in words, as torch sees them."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "GPU": ", ".join(gpus) or "none",
    }
