"""Figures of modules against plain forward hooks and float64, over the sequences in which modules are compared."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.helpers import architectures
from tests.helpers.measured_on import DEVICE, placed
from torch import nn

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.results.drift import ModuleDrift
from dtype_engine.runtime.measure.drift import DriftMeter
from dtype_engine.runtime.measure.listener import MeasurementListener
from dtype_engine.runtime.measure.modules.comparer import ModuleComparer
from dtype_engine.runtime.measure.modules.module_sums import compare_outputs
from dtype_engine.runtime.measure.modules.recorder import ModuleRecorder
from dtype_engine.runtime.measure.modules.routing import RoutingComparer
from dtype_engine.runtime.measure.plan import running_order

ALL = MeasurementListener(all_modules=lambda: True)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Given = dict[str, torch.Tensor]


class InPlace(nn.Module):
    """Every layer's output is written to by the next module, and that of the next by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.rectify = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.rectify(layer(x)).mul_(0.5)
        return x


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(16, 24, 3, stride=2), nn.GELU()), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10),
    )  # fmt: skip


def inputs_of(name: str) -> list[Given]:
    """Return seven inputs of one size. Modules are compared in the first one that runs, and in one of the last four."""
    draw = torch.Generator().manual_seed(3)
    if name == "llama":
        return [{"input_ids": torch.randint(3, architectures.VOCABULARY, (1, 40), generator=draw)} for _ in range(7)]
    shape = (2, 3, 18, 20) if name == "convolutions" else (5, 32)
    return [{"input" if name == "convolutions" else "x": torch.randn(shape, generator=draw)} for _ in range(7)]


def compared(inputs: Sequence[Given], session: de.Session, every: bool) -> list[Given]:
    """Return the inputs in which modules are compared, in input order."""
    order = running_order(session.need_inputs().batches)
    return [inputs[number] for number in sorted(order if every else (order[0], order[6]))]


def cast_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy with all saved tensors in this dtype. Buffers that are not saved, such as rotary frequencies, stay."""
    module = copy.deepcopy(module)
    saved = module.state_dict()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in saved and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return module


def module_outputs(module: nn.Module, inputs: Sequence[Given], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The outputs of every module as they were when it returned, flat, in float64. dtype: of floating inputs."""
    found: dict[str, list[torch.Tensor]] = {}

    def note(name: str, output: Any) -> None:
        while not isinstance(output, torch.Tensor):
            output = next(iter(output.values() if isinstance(output, dict) else output))
        found.setdefault(name, []).append(output.cpu().double().flatten())

    handles = [
        child.register_forward_hook(lambda _, __, output, name=name: note(name, output))  # type: ignore[misc]
        for name, child in module.named_modules()
        if name
    ]
    with torch.no_grad():
        for given in inputs:
            module(**{key: x.to(dtype) if dtype and x.is_floating_point() else x.clone() for key, x in given.items()})
    for handle in handles:
        handle.remove()
    return {name: torch.cat(outputs) for name, outputs in found.items()}


def check(
    modules: Sequence[ModuleDrift],
    reference: nn.Module,
    candidate: nn.Module,
    inputs: Sequence[Given],
    dtype: torch.dtype,
) -> None:
    """The figures of all modules are those by hand, to 1e-6 dB, or to 1e-4 dB where a product may take another kernel each time.
    dtype: of the candidate's floating inputs.
    """
    r, c = module_outputs(reference, inputs, None), module_outputs(candidate, inputs, dtype)
    assert [each.name for each in modules] == [*r]
    for each in modules:
        delta = c[each.name] - r[each.name]
        expected = float(20 * torch.log10(r[each.name].norm() / delta.norm()))
        assert each.sqnr_db == pytest.approx(expected, abs=1e-6 if DEVICE == "cpu" else 1e-4, rel=0), each.name
        largest = float(delta.abs().max())
        assert each.max_abs == (largest if DEVICE == "cpu" else pytest.approx(largest, rel=1e-6))
        assert each.nonfinite == 0


FLOATS_FOLLOW = de.Options(settings=de.RunSettings(float_inputs="model"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("name", ["llama", "convolutions", "in place"])
def test_module_figures_equal_those_of_plain_hooks(name: str, every: bool, dtype: str) -> None:
    torch.manual_seed(0)
    demo = de.open().model.module  # a trained Llama
    module = demo if name == "llama" else placed((convolutions() if name == "convolutions" else InPlace()).eval())
    inputs = inputs_of(name)
    session = de.open(copy.deepcopy(module), inputs=inputs, options=FLOATS_FOLLOW)
    session.cast("*", dtype)
    for _ in range(2):  # the second time with what is kept
        report = session.drift(ALL if every else None)
        assert report.modules_sequences == (7 if every else 2)
        assert report.sequences.done == 7
        among = compared(inputs, session, every)
        check(report.modules, module, cast_copy(module, DTYPES[dtype]), among, DTYPES[dtype])


FROM_A_FILE = """
import torch
from torch import nn

class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x):
        one, other = self.mix(x).chunk(2, -1)
        return self.out(one * other.sigmoid()), other, {"kept": one}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Attends() for _ in range(3))
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        for part in self.parts:
            x = x + part(x)[0]
        return self.norm(x), x

def example_inputs():
    torch.manual_seed(1)
    return {"x": torch.randn(5, 32)}
"""


def test_modules_that_return_tuples_are_compared(tmp_path: Path) -> None:
    file = tmp_path / "tuples.py"
    file.write_text(FROM_A_FILE)
    session = de.open(f"{file}:Model", options=FLOATS_FOLLOW)
    module = copy.deepcopy(session.model.module)
    session.cast("*", "bfloat16")
    inputs = [batch.kwargs for batch in session.need_inputs().batches]
    check(session.drift().modules, module, cast_copy(module, torch.bfloat16), inputs, torch.bfloat16)


def test_modules_are_compared_on_all_sequences_on_request() -> None:
    """If the request comes during the measurement, sequences that ran without comparisons run again."""
    inputs = inputs_of("llama")
    session = de.open(architectures.make("llama")[0], inputs=inputs)
    session.cast("*", "bfloat16")
    some, asked = session.drift(), list[bool]()

    def from_the_fourth_on() -> bool:
        asked.append(True)
        return len(asked) > 3

    later = session.drift(MeasurementListener(all_modules=from_the_fourth_on))
    exact = de.open(architectures.make("llama")[0], inputs=inputs, options=de.Options(modules="exact"))
    exact.cast("*", "bfloat16")
    full = exact.drift()
    assert some.output == later.output == full.output
    assert later.modules == full.modules
    assert (some.modules_sequences, later.modules_sequences, full.modules_sequences) == (2, 7, 7)
    assert session.drift().modules == some.modules  # another time in some, and the same ones


def test_measurement_that_ends_after_one_sequence_has_module_figures() -> None:
    """A measurement that ends early has figures of modules too."""
    session = de.open(architectures.make("llama")[0], inputs=inputs_of("llama"))
    session.cast("*", "bfloat16")
    found = DriftMeter(session.model, session.need_inputs()).measure(MeasurementListener(precision=lambda: 9.0))
    assert (found.extent.done, len(found.modules_numbers)) == (1, 1)
    assert len(found.modules) > 10


@pytest.mark.parametrize("shape", [(3, 50, 40), (40,), (), (0, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sqnr_of_module_outputs_is_right_for_every_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    reference = torch.randn(shape, generator=draw)
    candidate = (reference + 0.1 * torch.randn(shape, generator=draw)).to(dtype)
    found = compare_outputs(reference, candidate).drift("module")
    if not reference.numel():
        assert (found.sqnr_db, found.max_abs) == (math.inf, 0)
        return
    delta = candidate.double() - reference.double()
    assert found.sqnr_db == pytest.approx(float(20 * torch.log10(reference.double().norm() / delta.norm())), abs=1e-9)
    assert found.max_abs == float(delta.abs().max())


def test_sqnr_of_module_outputs_with_nonfinite_values_is_defined() -> None:
    reference = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    candidate = reference * 1.5
    masked, masked_too = reference.clone(), candidate.clone()
    masked[5, 7] = masked_too[5, 7] = -math.inf  # a mask is one that both have
    found = compare_outputs(masked, masked_too).drift("module")
    assert (found.nonfinite, found.sqnr_db) == (0, pytest.approx(20 * math.log10(2)))
    candidate[0, 3] = math.nan
    found = compare_outputs(reference, candidate).drift("module")
    assert (found.nonfinite, found.sqnr_db, found.max_abs) == (1, -math.inf, math.inf)
    nothing = torch.full_like(reference, math.nan)
    assert compare_outputs(nothing, nothing).drift("module").sqnr_db is None
    assert compare_outputs(reference, reference[:3]).drift("module").sqnr_db is None


def test_module_recorders_are_freed_without_garbage_collection() -> None:
    """Recorders hold hundreds of megabytes of outputs, and garbage collection is off during a measurement."""
    output = torch.randn(50, 8)
    gc.disable()
    try:
        recorder = ModuleRecorder(1 << 20)
        recorder("module", 0, output)
        comparer = ModuleComparer(recorder.outputs, RoutingComparer(None, {}))
        comparer("module", 0, output)
        observers = weakref.ref(recorder), weakref.ref(comparer)
        del recorder, comparer
        assert [observer() for observer in observers] == [None, None]
    finally:
        gc.enable()


class Head(nn.Module):
    """Returns what its last layer gives, and in bfloat16 something else that is made of it."""

    def __init__(self, in_bfloat16: str) -> None:
        super().__init__()
        self.first, self.head, self.narrow = nn.Linear(32, 32), nn.Linear(32, 48), nn.Linear(48, 48)
        self.in_bfloat16 = in_bfloat16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.first(x))
        if out.dtype == torch.float32:
            return out
        if self.in_bfloat16 == "copies":
            return out * 2
        return out.mul_(2) if self.in_bfloat16 == "writes" else self.narrow(out)


@pytest.mark.parametrize("in_bfloat16", ["copies", "writes", "goes on"])
def test_module_whose_output_is_the_model_output_only_in_the_reference_is_compared(
    in_bfloat16: Literal["copies", "writes", "goes on"],
) -> None:
    torch.manual_seed(0)
    module, x = Head(in_bfloat16).eval(), torch.randn(300, 32)
    session = de.open(module, inputs=[{"x": x}])
    with torch.no_grad():
        reference = module.head(module.first(x)).double()
        session.cast("*", "bfloat16")
        found = {each.name: each for each in session.drift().modules}["head"]
        delta = module.head(module.first(x.bfloat16())).double() - reference
    assert found.sqnr_db == pytest.approx(float(20 * torch.log10(reference.norm() / delta.norm())), abs=1e-6)


class Routes(nn.Module):
    """Examples go to the expert that their first value names; three layers follow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.experts[int(x[0, 0])](x)
        for layer in self.layers:
            x = layer(x)
        return x


def routed(*experts: int) -> list[Given]:
    draw = torch.Generator().manual_seed(2)
    inputs = [torch.randn(4, 8, generator=draw) for _ in experts]
    for x, expert in zip(inputs, experts, strict=True):
        x[0, 0] = expert
    return [{"x": x} for x in inputs]


@pytest.mark.parametrize("kept", [1 << 30, 0])
def test_drift_after_repeated_casts_equals_a_full_measurement(kept: int) -> None:
    """Over sequences of which some are compared, and others come another way."""
    models = (
        (architectures.make("llama")[0], inputs_of("llama")),
        (Routes().eval(), routed(0, 1, 2, 0, 1, 1, 2, 2, 0)),
    )
    for module, inputs in models:
        session = de.open(module, inputs=inputs)
        quick = DriftMeter(session.model, session.need_inputs(), budget=kept)
        names = [name for name, tensor in session.tree.tensors.items() if tensor.castable and tensor.persistent]
        for rules in (
            [], [Rule(names[-1], "bfloat16")], [Rule(names[0], "bfloat16")], [Rule("*", "bfloat16")], [Rule(names[-2], "int8")],
            [Rule("*", "float16"), Rule(names[len(names) // 2], "float32")], [Rule("*", "float16")], [],
        ):  # fmt: skip
            session.apply(Recipe(tuple(rules)))
            found, full = quick.measure(), DriftMeter(session.model, session.need_inputs()).measure()
            assert found.output == full.output
            assert found.modules == full.modules


class Grows(nn.Module):
    """Keeps a table for inputs up to the longest it has seen, in the dtype of its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
        self.table = torch.linspace(0, 1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > len(self.table):
            self.table = torch.linspace(0, 1, len(x)).to(self.layers[0].weight.dtype)
        x = x + self.table[: len(x), None].to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return x


def test_buffers_that_grow_with_a_longer_input_are_restored() -> None:
    """The second sequence, in which modules are not compared, is the longest."""
    session = de.open(Grows().eval(), inputs=[{"x": torch.randn(rows, 8)} for rows in (3, 5, 3, 3)])
    meter = DriftMeter(session.model, session.need_inputs())
    session.cast("*", "bfloat16")
    assert len(meter.measure().modules_numbers) == 1
    assert len(session.model.module.table) == 4  # type: ignore[arg-type]
    session.undo()
    assert meter.measure().output.max_abs == 0
