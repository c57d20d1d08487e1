"""The ways to run a model within limits: of memory, of single devices, and of the time until it is stopped."""

from __future__ import annotations

import dataclasses
import json
from unittest.mock import patch

import pytest
from tests.helpers import fake_accelerator, preloaded

import dtype_engine as de
from dtype_engine.core.errors import Cancelled
from dtype_engine.runtime.building import module_sources
from dtype_engine.runtime.measure.listener import MeasurementListener

from . import outside
from .commands import ALL_BF16, Job, Refused, Way, answer, check_drift, check_output, refusal
from .forms import Made

_CAST = ("--cast", ALL_BF16)


def drift_max_memory(job: Job) -> str:
    """With as much memory as its weights take it runs, and with half of that it says what they take."""
    found = answer("drift", *job.run, *_CAST, "--max-memory", f"cpu={_size(job.made)}")
    check_drift(job.made, found)
    said = refusal("drift", *job.run, *_CAST, "--max-memory", f"cpu={job.made.stored_bytes() // 2}")
    assert "the weights take" in said or "its weights take" in said, said
    return "plain torch"


def _size(made: Made) -> int:
    """The bytes of the files' tensors, or those of the module in memory if they are more."""
    module = made.module
    loaded = (*module.parameters(), *module.buffers()) if module is not None else ()
    return max(made.stored_bytes(), sum(tensor.nbytes for tensor in loaded))


def drift_over_memory(job: Job) -> str:
    """All weights are read from the files, which are larger than the memory, and the figures are those of plain torch."""
    limit = ("--max-memory", f"cpu={job.made.stored_bytes() // 2}", "--over-memory")
    with patch.object(module_sources, "SMALLEST", 1):  # otherwise the weights of these models stay in memory
        found = answer("drift", *job.run, *_CAST, *limit)
    check_drift(job.made, found)
    assert found["memory"]["read_bytes"] > 0
    return "plain torch"


def drift_save(job: Job) -> str:
    """Stopped after the first of its inputs, it goes on after that one, and has the figures of plain torch at the end."""
    made, file = job.made, job.work / "drift.json"
    answer("drift", *job.run, *_CAST, "--save", str(file))
    found = answer("drift", *job.run, *_CAST, "--save", str(file))  # nothing is left to run
    check_drift(made, found)
    assert "other rules" in refusal("drift", *job.run, "--cast", "*=float16", "--save", str(file))
    inputs, stopped = outside.rows(made), job.work / "stopped.json"
    assert len(inputs) > 1
    for number in range(2):
        session = de.open(made.model, options=job.options, inputs=inputs)
        session.cast("*", "bfloat16")
        done: list[int] = []
        listener = MeasurementListener(
            on_sequence=lambda totals, done=done: done.extend(totals.numbers),
            cancelled=lambda first=not number, done=done: first and bool(done),
        )
        if number:
            check_drift(made, {"output": dataclasses.asdict(session.drift(listener, save=stopped).output)})
            continue
        with pytest.raises(Cancelled):
            session.drift(listener, save=stopped)
        assert len(json.loads(stopped.read_text())["totals"]["sequences"]) == 1
    return "plain torch"


def device_map(job: Job) -> str:
    """On two accelerators, filled one after the other and as a file says. The cast is one with which all is computed in float32:
    these accelerators have fewer fused kernels than the CPU, which round to 16 bits in other places.
    """
    made, name = job.made, fake_accelerator.NAME
    first, second = f"{name}:0", f"{name}:1"
    size = _size(made)
    limits = [f"--max-memory={first}={int(0.7 * size)}", f"--max-memory={second}={2 * size}"]
    _on_two(job, ["--device-map", "auto", *limits], set())
    file = job.work / "map.json"
    file.write_text(json.dumps({"": first, _layer(outside.first_linear(made)): second}))
    _on_two(job, ["--device-map", str(file)], {first, second})
    return "plain torch"


def _layer(name: str) -> str:
    """The layer that a module is in: all of it has to be on one device, because its code adds up what its modules give."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: number + 1])


def _on_two(job: Job, asked: list[str], devices: set[str]) -> None:
    rules = ("*=float32", "type:Linear=int8") if job.made.module is not None else (ALL_BF16,)
    casts = [f"--cast={rule}" for rule in rules]
    command = ("drift", *job.run, *casts, "--device", fake_accelerator.NAME, *asked, "--json")
    ran = preloaded.run(preloaded.module("tests.matrix.two_accelerators"), *command)
    if ran.returncode == 2:
        (line,) = [line for line in ran.stderr.splitlines() if line.startswith("dtype-engine: ")]
        raise Refused(line.removeprefix("dtype-engine: "))
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    check_output(found, outside.linears_in_int8(job.made))
    used = {device for device, nbytes in found["memory"]["resident_by_device"] if nbytes}
    assert used >= devices, (used, found["memory"])
    assert used & {f"{fake_accelerator.NAME}:0", f"{fake_accelerator.NAME}:1"}, used


LIMITS: dict[str, Way] = {
    "drift --max-memory": drift_max_memory,
    "drift --over-memory": drift_over_memory,
    "drift --save": drift_save,
    "drift --device-map": device_map,
}
