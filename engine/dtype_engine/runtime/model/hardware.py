"""Describes the hardware that torch uses, for bug reports."""

from __future__ import annotations

import torch

from dtype_engine.runtime.device import accelerator_names


def hardware() -> dict[str, str]:
    """Return three entries: "kernels", the instruction set of torch's CPU kernels, such as "AVX512"; "threads", torch's number of
    threads; and "accelerator", the names of the accelerators or "none".
    """
    return {
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "accelerator": ", ".join(accelerator_names()) or "none",
    }
