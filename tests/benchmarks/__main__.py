"""Speed and memory, as ratios within one run: `python -m tests.benchmarks`, or `make benchmarks`.

Absolute times are this machine's, which the first line names; what is promised are the ratios. Exit status 1 when one is missed.
"""

from __future__ import annotations

import argparse
import compileall
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from tests.helpers.peak_memory import peak_anonymous

import dtype_engine
import dtype_tui
from dtype_engine.core.cancellation import never

from .crowded import crowded
from .live import beside_plain_passes, errors, live
from .machine import machine
from .rows import Row, seconds
from .simulated import simulated
from .slow_line import slow_line
from .starting import starting
from .table import table
from .watched import EMPTY_APP, first_paints, keys, p99, with_long_text
from .weights import round_trips
from .workers import workers

if TYPE_CHECKING:
    from dtype_engine.runtime.measure.drift import DriftMeter


BUSY_RUNS = 4
"""One measurement has some 65 keys: its 99th percentile would be its slowest."""
PAIRS = 25
"""Measurements and plain passes in turns: half of their ratios are within 0.02 of the median, and 0.1 beside other programs."""


def llama(folder: Path, layers: int = 24, hidden: int = 768) -> Path:
    """Write a Llama checkpoint with random weights in bfloat16 to the folder."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=8000, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, tie_word_embeddings=True, max_position_embeddings=1024,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def casting(folder: Path) -> list[Row]:
    """Measure how long it takes to cast a whole model and to undo the cast."""
    import torch

    import dtype_engine as de
    from dtype_engine import Recipe, Rule
    from dtype_engine.runtime.session.process_memory import process_memory

    session = de.open(str(folder))
    recipe = Recipe((Rule("*", "float16"),))
    originals = [weight.stored.read() for weight in session.model.weights.values() if weight.info.castable]

    def by_hand() -> None:
        # As a cast does it: every new tensor is kept until all are there.
        kept = [tensor.to(torch.float16) for tensor in originals]
        del kept

    def cast() -> None:
        session.apply(recipe)

    cast_times, hand_times, undo_times = [], [], []
    by_hand()
    cast()
    session.undo()
    for _ in range(5):
        hand_times.append(seconds(by_hand))
        cast_times.append(seconds(cast))
        undo_times.append(seconds(session.undo))
    before = process_memory().anonymous or 0
    cast()
    grown = (process_memory().anonymous or 0) - before
    beyond = (grown - session.plan.planned_bytes) / max(tensor.nbytes for tensor in originals)
    ratio = statistics.median(cast_times) / statistics.median(hand_times)
    return [
        Row("cast of a whole model / the sum of tensor.to", ratio, "x", 1.3),
        Row("undo of a whole-model cast", 1000 * statistics.median(undo_times), "ms", 50),
        Row("memory a cast takes beyond its own bytes / the largest tensor", beyond, "x", 1),
    ]


def measuring(folder: Path) -> list[Row]:
    """Measure the time of a drift measurement relative to a plain forward pass in the same dtype, also after a cast late in the
    model.
    """
    import dtype_engine as de
    from dtype_engine import Recipe, Rule
    from dtype_engine.runtime.measure.drift import DriftMeter

    session = de.open(str(folder))
    rows = list(beside_plain_passes(session, PAIRS))
    session.apply(Recipe())
    meter = DriftMeter(session.model, session.inputs)  # type: ignore[arg-type]
    meter.measure()
    full, late = [], []
    for number in range(7):
        # Another dtype each time, so that there is always something to measure.
        session.apply(Recipe((Rule("model.layers.18", ("float32", "float16")[number % 2]),)))
        late.append(seconds(meter.measure))
        full.append(seconds(meter_without_reuse(meter).measure))
    ratio = statistics.median(a / b for a, b in zip(late, full, strict=True))
    rows.append(Row("measuring after a cast at 3/4 of the depth / measuring in full", ratio, "x", 0.5))
    return rows


def reference(folder: Path) -> list[Row]:
    """What a reference pass of a bfloat16 checkpoint adds to the process's own memory, beside the activations.

    The activations are what the same model, really in float32, adds in a plain pass.
    """
    import torch

    import dtype_engine as de
    from dtype_engine.core.options import RunSettings
    from dtype_engine.core.system_memory import trim_heap
    from dtype_engine.runtime.passes.one_pass import PassOptions
    from dtype_engine.runtime.passes.runner import ForwardRunner

    session = de.open(str(folder))
    assert session.inputs is not None
    batch = session.inputs.batches[0]
    largest = max(weight.stored.read().numel() * 4 for weight in session.model.weights.values())

    def run() -> None:
        with ForwardRunner(session.model, RunSettings(), never) as passes:
            passes.reference(passes.reference_call(batch), PassOptions(learns=True))

    def plain() -> None:
        with torch.no_grad():
            session.model.module(*batch.args, **batch.kwargs)

    run()
    grown = peak_anonymous(run)
    session.cast("*", "float32")
    plain()
    activations = peak_anonymous(plain)
    session.undo()
    trim_heap()
    return [
        Row("activations of a float32 pass", activations / 2**20, "MiB"),
        Row("anonymous memory a reference pass adds", grown / 2**20, "MiB"),
        Row(
            "the same / (2 x the largest tensor in float32 + activations)",
            grown / (2 * largest + activations),
            "x",
            1.0,
        ),
    ]


def meter_without_reuse(meter: DriftMeter) -> DriftMeter:
    """Return a copy of the meter that keeps its reference outputs and runs every candidate in full."""
    import copy

    other = copy.copy(meter)
    other.budget, other._caches = 0, {}
    return other


def giant(folder: Path) -> list[Row]:
    """A checkpoint with the shape of DeepSeek-V3: 671 B parameters in 90 427 tensors."""
    import psutil
    from tests.helpers import large_checkpoints
    from tests.helpers.terminal import PROGRAM, Terminal

    path = large_checkpoints.write(folder.parent / "giant")
    empty, ours = first_paints((sys.executable, "-c", EMPTY_APP), (PROGRAM, str(path)))
    opened = Terminal(str(path))
    opened.wait_for("626.9 GiB", 60)
    whole = time.perf_counter() - opened.started
    opened.wait_for("planning only", 60)
    time.sleep(1)
    times, _ = keys(opened, 100)
    resident = psutil.Process(opened.pid).memory_info().rss
    filtered = []
    opened.press("/")
    opened.wait_for("matches")
    time.sleep(0.3)
    for text in ("experts.24", "7.up", "_proj.weight"):
        for letter in text[:-1]:
            opened.press(letter)
            time.sleep(0.15)
        while opened.read(0.05):
            pass
        before = opened.text
        started = time.perf_counter()
        opened.press(text[-1])
        while opened.text == before or not opened.read(0.0):
            opened.read(0.005)
            if opened.text != before:
                break
        filtered.append(time.perf_counter() - started)
    opened.close()
    return [
        Row("671 B: tree on the screen / first paint of an empty app", ours / empty, "x", 1.5),
        Row("671 B: all headers read", whole, "s"),
        Row("671 B: resident memory", resident / 2**20, "MiB", 250),
        Row("671 B: key to first byte, p50", 1000 * statistics.median(times), "ms"),
        Row("671 B: key to first byte, p99", 1000 * p99(times), "ms", 30),
        Row("671 B: filter, last key to the screen, slowest of three", 1000 * max(filtered), "ms", 100),
    ]


def weights(folder: Path) -> list[Row]:
    """Round-trip errors of a tensor of 200 MB, beside the bare cast of it, in a process of their own: memory that a model left
    behind would make the cast three times as fast as it is where people meet it.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(round_trips).result()


def screen(folder: Path) -> list[Row]:
    """First paint and keys, from outside, in a pseudo-terminal."""
    from tests.helpers.terminal import PROGRAM, Terminal

    empty, ours = first_paints((sys.executable, "-c", EMPTY_APP), (PROGRAM, "demo"))
    rows = [
        Row("first paint of an empty Textual app", 1000 * empty, "ms"),
        Row("first paint of the demo / of an empty app", ours / empty, "x", 1.5),
    ]

    opened = Terminal("demo")
    opened.wait_for("ready")
    time.sleep(1)
    times, sizes = keys(opened, 100)
    opened.press("2")
    opened.wait_for("1 rule")
    time.sleep(1)
    opened.wait_for("ready")
    _, with_a_rule = keys(opened, 20)
    opened.close()
    rows += [
        Row("key to first byte, idle, p50", 1000 * statistics.median(times), "ms"),
        Row("key to first byte, idle, p99", 1000 * p99(times), "ms", 30),
        Row("bytes of a cursor move at 120 x 36, median", statistics.median(sizes), "B", 400),
        Row("the same with a rule, which the Recipe pane explains", statistics.median(with_a_rule), "B", 600),
    ]
    text = with_long_text(folder)
    busy: list[float] = []
    for _ in range(BUSY_RUNS):
        opened = Terminal(str(folder), "--cast", "*.mlp=float32", "--text", str(text))
        opened.wait_for("measuring", 120)
        times, _ = keys(opened, 1000, until="measuring")
        busy += times
        opened.close()
    rows += [
        Row("key to first byte while measuring, p50", 1000 * statistics.median(busy), "ms"),
        Row(f"the same, p99 of {len(busy)} keys in {BUSY_RUNS} measurements", 1000 * p99(busy), "ms", 20),
    ]
    return rows


def exporting(folder: Path) -> list[Row]:
    """An export beside `save_pretrained` of the same cast: time, and memory with no file behind it."""
    import shutil

    import torch
    import transformers
    from tests.helpers.exporting import export_checkpoint

    from dtype_engine import Recipe, Rule
    from dtype_engine.checkpoint import open_checkpoint

    recipe = Recipe((Rule("*", "float16"), Rule("*norm*", "float32"), Rule("*.mlp", "float8_e4m3fn")))
    folder = llama(folder.parent / "large", hidden=896)  # 600 MiB
    ours, theirs = folder.parent / "ours", folder.parent / "theirs"

    def export() -> None:
        shutil.rmtree(ours, ignore_errors=True)
        export_checkpoint(open_checkpoint(folder), "model", recipe, ours)

    def save(scaled: bool = True) -> None:
        """Cast and save as a user would. scaled: whether weights get a scale for each channel, as in the export."""
        shutil.rmtree(theirs, ignore_errors=True)
        model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype="auto")
        for name, parameter in list(model.named_parameters()):
            wanted = torch.float8_e4m3fn if ".mlp." in name else torch.float32 if "norm" in name else torch.float16
            if ".mlp." in name and scaled:
                values = parameter.data.float()
                scale = values.abs().amax(dim=1, keepdim=True) / 448
                parameter.data = (values / scale).clamp(-448, 448).to(wanted)
                model.get_submodule(name.rpartition(".")[0]).register_buffer("weight_scale", scale)
            else:
                parameter.data = parameter.data.to(wanted)
        model.save_pretrained(theirs)

    def synced(run: Callable[[], object]) -> float:
        os.sync()  # what was written before is not waited for now
        return seconds(run)

    def save_durably() -> None:
        save()
        for file in theirs.iterdir():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())

    ratios, plain, durable, rates = [], [], [], []
    export()
    save()
    for _ in range(7):
        durable.append(synced(export) / synced(save_durably))
        # An export waits for the disk before it gets its name, and save_pretrained does not: the work alone, side by side.
        with mock.patch("os.fsync"):
            ours_took = synced(export)
        ratios.append(ours_took / synced(save))
        plain.append(ours_took / synced(partial(save, scaled=False)))
        rates.append(sum(file.stat().st_size for file in ours.iterdir()) / 2**20 / ours_took)
    grown, held = peak_anonymous(export), peak_anonymous(save)
    return [
        Row("exporting a checkpoint in three dtypes", statistics.median(rates), "MiB/s"),
        Row("the same / from_pretrained, cast and save_pretrained", statistics.median(ratios), "x", 1.0),
        Row("both until the bytes are on the disk", statistics.median(durable), "x", 1.0),
        Row("the same / save_pretrained of float8 without scales, which is less work", statistics.median(plain), "x"),
        Row("anonymous memory of an export", grown / 2**20, "MiB"),
        Row("the same / that of from_pretrained, cast and save_pretrained", grown / held, "x", 0.33),
    ]


SECTIONS: dict[str, Callable[[Path], Iterable[Row]]] = {
    "casting": casting,
    "exporting": exporting,
    "reference": reference,
    "measuring": measuring,
    "live": live,
    "errors": errors,
    "weights": weights,
    "starting": starting,
    "screen": screen,
    "crowded": crowded,
    "slow line": slow_line,
    "giant": giant,
    "table": table,
    "workers": workers,
    "simulated": simulated,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", choices=[*SECTIONS, []], help="all, or just these")
    chosen = parser.parse_args().only or list(SECTIONS)
    missed = False
    # As pip does for what it installs; from a working copy Python does it itself, unless it is told not to write there.
    for package in (dtype_engine, dtype_tui):
        compileall.compile_dir(Path(package.__file__).parent, quiet=1)
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = llama(Path(scratch) / "llama")
        for name in chosen:
            for row in SECTIONS[name](folder):
                missed = missed or row.missed
                budget = f"  at most {row.budget:g}" if row.budget is not None else ""
                budget += f"  at least {row.least:g}" if row.least is not None else ""
                print(
                    f"{'MISSED' if row.missed else '':6} {row.value:10.2f} {row.unit:3} {row.what}{budget}", flush=True
                )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
