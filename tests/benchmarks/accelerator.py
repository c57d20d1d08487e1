"""What measuring adds to plain passes on an accelerator: a model of half a billion weights in bfloat16, with random values.

    python -m tests.benchmarks.accelerator [cuda] [LAYERS] [PROFILE]

For each shape of inputs, in six sequences each: plain torch's passes in float32 without TF32 and in bfloat16; the same two
under the program's modes; and a whole measurement of the drift, which runs both and compares. The last column is the ratio of the
measurement to the two plain passes. The times are medians, each after the device has finished. PROFILE is a file for torch's table
of what takes the time of one measurement. The lines of ours at which a measurement waits for CUDA are counted.
"""

from __future__ import annotations

import copy
import gc
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import nn

import dtype_engine as de
from dtype_engine.core.cancellation import never
from dtype_engine.core.options import RunSettings
from dtype_engine.runtime.device import exact_float32, synchronize
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.measure.drift import DriftMeter
from dtype_engine.runtime.passes.runner import ForwardRunner

SEQUENCES = 6
SHAPES = ((1, 2048), (4, 2048))
VOCABULARY = 32768
REPEATS = 2
MOST = 1.15
"""The ratio that a measurement may have where the device, not Python, is what takes the time."""


def model_of(layers: int, device: str) -> nn.Module:
    """Qwen2.5 0.5B with a smaller vocabulary, or one with fewer layers."""
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=896, intermediate_size=4864, num_hidden_layers=layers, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """The median time of some runs after one warm-up."""
    times = []
    for _ in range(1 + REPEATS):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def plainly(module: nn.Module, inputs: Inputs) -> None:
    with torch.no_grad(), exact_float32(next(module.parameters()).device):
        for batch in inputs.batches:
            module(*batch.args, **batch.kwargs)


def under_the_mode(session: de.Session, inputs: Inputs, which: str) -> None:
    with ForwardRunner(session.model, RunSettings(), never, watch=False) as runner:
        for batch in inputs.batches:
            getattr(runner, which)(getattr(runner, f"{which}_call")(batch))


def waits(run: Callable[[], object]) -> Counter[str]:
    """Return how often each line of our code makes the CPU wait for CUDA in a run."""
    found: Counter[str] = Counter()

    def note(*_: object, **__: object) -> None:
        ours = [frame for frame in traceback.extract_stack() if "dtype_engine" in frame.filename]
        found[f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "not ours"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else str(torch.accelerator.current_accelerator() or "cpu")
    module = model_of(int(sys.argv[2]) if len(sys.argv) > 2 else 24, name)
    wide = copy.deepcopy(module).float()
    weights = sum(parameter.numel() for parameter in module.parameters())
    print(f"{weights / 1e6:.0f} M weights in bfloat16 on {name}, torch {torch.__version__}; times in ms")
    print("sequences   plain f32   plain bf16   f32 under mode   bf16 under mode   measuring   ratio", flush=True)
    shapes = SHAPES if name != "cpu" else ((1, 64),)
    for batch, length in shapes:
        numbers = torch.Generator().manual_seed(0)
        given = [torch.randint(0, VOCABULARY, (batch, length), generator=numbers).to(name) for _ in range(SEQUENCES)]
        session = de.open(module, inputs=[{"input_ids": ids, "use_cache": False} for ids in given])
        inputs, device = session.need_inputs(), session.model.device
        meter = DriftMeter(session.model, inputs, budget=0)
        plain = [milliseconds(partial(plainly, each, inputs), device) for each in (wide, module)]
        under = [
            milliseconds(partial(under_the_mode, session, inputs, which), device)
            for which in ("reference", "candidate")
        ]
        measured = milliseconds(meter.measure, device)
        ratio = measured / sum(plain)
        print(
            f"{batch:>2} x {length:>4} {plain[0]:>11.1f} {plain[1]:>12.1f} {under[0]:>9.1f} {under[0] / plain[0]:5.2f}x "
            f"{under[1]:>10.1f} {under[1] / plain[1]:5.2f}x {measured:>11.1f} {ratio:>6.2f}x{' over' if ratio > MOST else ''}",
            flush=True,
        )
        if device.type == "cuda" and (batch, length) == shapes[0]:
            for line, count in waits(meter.measure).most_common(20):
                print(f"     waits {count:>6} at {line}")
            if len(sys.argv) > 3:
                activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
                with torch.profiler.profile(activities=activities) as profile:
                    meter.measure()
                    synchronize(device)
                tables = [
                    profile.key_averages().table(sort_by=by, row_limit=15, max_name_column_width=60)
                    for by in ("self_cuda_time_total", "self_cpu_time_total")
                ]
                Path(sys.argv[3]).write_text("\n".join(tables))
        del session, meter
        gc.collect()


if __name__ == "__main__":
    main()
