"""What measuring adds to plain passes on an accelerator: a model of half a billion weights in bfloat16, with random values.

    python -m tests.benchmarks.accelerator [cuda] [LAYERS]

For each shape of inputs: a plain pass, the same pass under the program's mode, and the measurement of the drift, whose reference
was kept. The ratios are medians of pairs in turn, each after the device has finished.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable

import torch
import transformers

import dtype_engine as de
from dtype_engine.core.cancellation import never
from dtype_engine.core.options import RunSettings
from dtype_engine.runtime.device import synchronize
from dtype_engine.runtime.measure.drift import DriftMeter
from dtype_engine.runtime.passes.runner import ForwardRunner

SHAPES = ((1, 512), (1, 2048), (4, 2048), (16, 2048))
PAIRS = 5
MOST = 1.15
"""The ratio that a measurement may have where the device, not Python, is what takes the time."""


def model_of(layers: int, device: str) -> torch.nn.Module:
    """Qwen2.5 0.5B, or one with fewer layers."""
    config = transformers.Qwen2Config(
        vocab_size=32768, hidden_size=896, intermediate_size=4864, num_hidden_layers=layers, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).eval()


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - started


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else str(torch.accelerator.current_accelerator() or "cpu")
    module = model_of(int(sys.argv[2]) if len(sys.argv) > 2 else 24, name)
    weights = sum(parameter.numel() for parameter in module.parameters())
    print(f"{weights / 1e6:.0f} M weights in bfloat16 on {name}, torch {torch.__version__}")
    shapes = SHAPES if name != "cpu" else SHAPES[:1]
    for batch, length in shapes:
        ids = torch.randint(0, 32768, (batch, length), generator=torch.Generator().manual_seed(0))
        session = de.open(module, inputs={"input_ids": ids.to(name), "use_cache": False})
        session.cast("*.mlp", "float16")
        session.cast("*.mlp", "bfloat16")
        device, inputs = session.model.device, session.need_inputs()
        one = inputs.batches[0]

        def plain(given: dict[str, object] = one.kwargs) -> None:
            with torch.no_grad():
                module(**given)

        runner = ForwardRunner(session.model, RunSettings(), never, watch=False)

        def bare(runner: ForwardRunner = runner, given: dict[str, object] = one.kwargs) -> None:
            with runner:
                runner.candidate(lambda: module(**given))

        meter = DriftMeter(session.model, inputs, budget=16 << 30, working=16 << 30, reuse=False)
        for run in (plain, bare, meter.measure, meter.measure):
            run()
        times = [[seconds_of(run, device) for run in (plain, bare, meter.measure)] for _ in range(PAIRS)]
        alone = statistics.median(row[0] for row in times)
        under, measured = (statistics.median(row[column] / row[0] for row in times) for column in (1, 2))
        print(
            f"{batch:>3} x {length:>5} tokens: plain {1000 * alone:8.1f} ms, under the mode {under:5.2f} x, "
            f"measuring {measured:5.2f} x{'' if measured <= MOST else f' (over {MOST})'}",
            flush=True,
        )
        del session, meter, runner
        gc.collect()


if __name__ == "__main__":
    main()
