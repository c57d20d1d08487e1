"""An engine that sends two million events as fast as its pipe takes them, and reads no request after the first.

`python -m tests.helpers.flooding_engine KIND`, where KIND is one of `FLOODS` or "windows".
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable

import msgspec

from dtype_engine.core.options import RunSettings
from dtype_engine.core.version import __version__
from dtype_engine.recipe import Recipe
from dtype_engine.results.drift import DriftReport, Extent, ImplicitCastStats, ModuleDrift, OutputDrift, Seconds
from dtype_engine.results.memory import MemoryStats
from dtype_engine.service import control, events
from dtype_engine.service.frames import FrameWriter
from dtype_engine.service.jobs import FLOW
from dtype_engine.service.messages import Answer, TreePart

EVENTS = 2_000_000


def _measured(number: int) -> DriftReport:
    output = OutputDrift(
        elements=100, mean_abs=1e-3, max_abs=0.5, rel_l2=0.01, sqnr_db=40.0, cosine=0.999, nonfinite=0, positions=973,
        kl_mean=2.5e-4, kl_mean_se=1e-5, top1_agreement=0.98,
        values={"kl_median": 2e-4, "kl_p95": 9e-4, "kl_p99": 1.5e-3, "kl_p999": 2e-3, "kl_max": 3e-3, "top1_agreement_se": 0.004},
    )  # fmt: skip
    whole = Extent(done=6, total=6, positions=973, of_tokens=True, kl_error=0.0)
    return DriftReport(
        "demo", "cpu", "float32", (), "defaults", f"prompts {number}", "logits", output, (), MemoryStats(),
        Seconds(0.1, 0.2), whole, 6,
    )  # fmt: skip


FLOODS: dict[str, Callable[[int], Answer | TreePart]] = {
    "progress": lambda number: events.MeasuringProgress(Recipe(), "candidate", number % 1000, 1000),
    "messages": lambda number: events.Noticed(f"notice {number}"),
    "tree": lambda number: TreePart(
        True,
        ((f"layer.{number}.weight", (4, 4), "float32", "parameter", (), None, None, False, False, (), None, None),),
        (),
    ),
    "modules": lambda number: events.ModulesMeasured(Recipe(), (ModuleDrift(f"layer.{number}", 0.1, 0.2, 0),)),
    "recipes": lambda number: events.RecipeMeasured(_measured(number), RunSettings()),
    "mixed": lambda number: (events.Idle(), events.Jobs("measure", ()), events.Noticed("again"))[number % 3],
}
"""Makes the event of a number, by what the flood is of."""
_CASTS = tuple(
    ImplicitCastStats(f"layer.{number}", "linear", "float32", "bfloat16", 10, 2, False) for number in range(1000)
)


def _window(number: int) -> Answer:
    return events.JobDone(Recipe(), FLOW.ask(None), _CASTS)


def main() -> None:
    writer = FrameWriter(sys.stdout.buffer.write)
    writer.mark()
    make = _window if sys.argv[1] == "windows" else FLOODS[sys.argv[1]]
    first = (control.Hello(control.PROTOCOL, __version__), control.Opened("flood"))
    for answer in itertools.chain(first, map(make, range(EVENTS))):
        writer.put(msgspec.msgpack.encode(answer))
        if isinstance(answer, control.Opened):
            sys.stdout.buffer.flush()
    sys.stdout.buffer.flush()
    time.sleep(600)


if __name__ == "__main__":
    main()
