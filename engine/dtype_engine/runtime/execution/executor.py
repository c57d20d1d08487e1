"""Runs reference and candidate over sequences, as the settings of a run say that they are executed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from dtype_engine.core.errors import UserError
from dtype_engine.core.execution import EXCLUDE, Execution
from dtype_engine.core.options import RunSettings
from dtype_engine.runtime.execution.batches import PartObserver, join
from dtype_engine.runtime.execution.compiled import CompiledModel
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.forward_pass import ModuleObserver
from dtype_engine.runtime.passes.model_behavior import Run
from dtype_engine.runtime.passes.one_pass import PassOptions, PassResult
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner
from dtype_engine.runtime.passes.stepwise import STATES, StepObserver, stepwise


class Executor:
    """Runs passes over the sequences `batches`. What a batch computed of its other sequences is kept until they are asked for.

    Attributes:
        not_compared: the names of modules whose outputs can't be compared in this execution.
        overflowing: the names of states of recurrent layers with values that became infinite in their format.
    """

    def __init__(self, runner: ForwardRunner, batches: Sequence[Batch]) -> None:
        self.not_compared: set[str] = set()
        self.overflowing: set[str] = set()
        self._runner, self._batches = runner, batches
        self._model: CompiledModel | None = None
        self._kept: dict[tuple[Run, Execution, int], PassResult[Any]] = {}

    def run(
        self, run: Run, execution: Execution, number: int, options: PassOptions, observer: ModuleObserver
    ) -> PassResult[Any]:
        """Run the reference or the candidate over a sequence. The result's main output is that of this sequence alone. Raises
        NoForward, KernelError, Cancelled, and UserError if the model or the inputs can't be executed so.
        """
        options = dataclasses.replace(options, execution=execution.check())
        if run == "candidate" and self._runner.model.state_formats:
            execution = token_by_token(execution)
        if not execution.regroups:
            return self._pass(run, self._batches[number], options, observer)
        kept = self._kept.pop((run, execution, number), None)
        if kept is not None and options.watched is not None:
            return kept
        options = dataclasses.replace(options, cache_bytes=0, cached=None, earlier=None)
        if execution.compile is not None:
            return self._compiled(run, execution.compile, number, options, observer)
        if execution.decode:
            return self._token_by_token(run, number, options, observer)
        return self._in_batch(run, number, execution, options, observer)

    def _pass(self, run: Run, batch: Batch, options: PassOptions, observer: ModuleObserver) -> PassResult[Any]:
        runner = self._runner
        if run == "reference":
            return runner.reference(runner.reference_call(batch), options, observer)
        return runner.candidate(runner.candidate_call(batch), options, observer)

    def _in_batch(
        self, run: Run, number: int, execution: Execution, options: PassOptions, observer: ModuleObserver
    ) -> PassResult[Any]:
        first = number // execution.batch * execution.batch
        members = range(first, min(first + execution.batch, len(self._batches)))
        joined = join([self._batches[each] for each in members], self._runner.model.module, execution)
        of_one = PartObserver(observer, joined, number - first)
        ran = self._pass(run, joined.batch, options, of_one)
        self.not_compared |= of_one.left_out
        name, output = main_output(ran.output)
        for index, member in enumerate(members):
            part = joined.part(index, output)
            if part is not None:
                self._kept[run, execution, member] = dataclasses.replace(
                    ran, output={name: part.clone()}, seconds=ran.seconds / len(members)
                )
        return self._kept.pop((run, execution, number))

    def _compiled(
        self, run: Run, backend: str, number: int, options: PassOptions, observer: ModuleObserver
    ) -> PassResult[Any]:
        runner = self._runner
        if run == "reference" and (wide := _not_float32(runner.model)) is not None:
            raise UserError(
                f"compile={backend} runs the tensors as they are stored, and the reference is in float32 while {wide} is not: "
                "compile the candidate"
            )
        if self._model is None:
            self._model = CompiledModel(runner.model, backend)
        batch = (
            runner.reference_batch(self._batches[number])
            if run == "reference"
            else runner.candidate_batch(self._batches[number])
        )
        ran = runner.plain(partial(batch.run, self._model), options)
        with torch.no_grad():
            self._model.give(observer)
        return ran

    def close(self) -> None:
        """Remove what a compiled model needs. The executor can't be used afterwards."""
        if self._model is not None:
            self._model.close()

    def _token_by_token(self, run: Run, number: int, options: PassOptions, observer: ModuleObserver) -> PassResult[Any]:
        runner, steps = self._runner, StepObserver(observer)
        batch = self._batches[number]
        moved = runner.reference_batch(batch) if run == "reference" else runner.candidate_batch(batch)
        why = STATES if runner.model.state_formats else "decode=yes"
        call = stepwise(moved, runner.model.module, steps.begin_step, why)
        ran = runner.reference(call, options, steps) if run == "reference" else runner.candidate(call, options, steps)
        with torch.no_grad():
            self.not_compared |= steps.give()
        self.overflowing |= ran.overflowing
        return dataclasses.replace(ran, finished=[], spans=[])


def for_states(model: LiveModel, settings: RunSettings) -> RunSettings:
    """Return settings with which reference and candidate run token by token, if states of recurrent layers have a format. Raises
    UserError if an execution excludes that.
    """
    if not model.state_formats:
        return settings
    return dataclasses.replace(
        settings,
        execution=token_by_token(settings.execution),
        reference_execution=token_by_token(settings.reference_execution),
    )


def token_by_token(execution: Execution) -> Execution:
    """Return an execution that runs token by token, as rounded states of recurrent layers need it. Raises UserError if `execution`
    excludes that.
    """
    for axis in EXCLUDE["decode"]:
        if axis in execution.axes():
            raise UserError(f"{STATES} runs token by token, one sequence at a time: leave {axis} out")
    return msgspec.structs.replace(execution, decode=True)


def _not_float32(model: LiveModel) -> str | None:
    """Return the name of a weight that a reference pass would widen or take from another checkpoint, or None."""
    weights = (each for each in model.weights.values() if each.info.castable)
    return next(
        (each.info.name for each in weights if each.dtype != "float32" or each.other_reference is not None), None
    )
