"""Runs the backward passes of one sequence, and computes the local errors of each operation while its gradients are in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from dtype_engine.core.errors import Cancelled, NoForward, UserError
from dtype_engine.core.foreign_code import foreign_code
from dtype_engine.runtime.formats.row_blocks import stopping
from dtype_engine.runtime.passes.runner import ForwardRunner
from dtype_engine.runtime.scan.cache_writes import CacheWrite
from dtype_engine.runtime.scan.gradient_sums import GradientSums
from dtype_engine.runtime.scan.kept_tensors import ActivationFile
from dtype_engine.runtime.scan.local_errors import LocalErrors
from dtype_engine.runtime.scan.probes import OutputProbes
from dtype_engine.runtime.scan.routing import TopKCall
from dtype_engine.runtime.scan.weight_ops import WeightOp

Operation = WeightOp | CacheWrite


@dataclass
class BackwardPasses:
    """Runs the backward passes of one sequence. `on_gradient` must be the hook of all recorded operations."""

    runner: ForwardRunner
    costly: Mapping[str, tuple[str, ...]]
    """By weight name: the dtypes to which a cast can change the output, because it rounds the weight or its activations."""
    local: LocalErrors
    budget: int
    """The maximum number of bytes for gradients."""
    file: ActivationFile | None
    """The file in which activations are kept until the backward passes, or None if they stay in memory."""
    on_measured: Callable[[int, int], None]
    """Called as `on_measured(done, total)` with the numbers of measured operations and of all operations."""
    differentiated: set[str] = field(default_factory=set)
    """The weights of operations whose gradients the model computes itself, for example with `torch.autograd.grad`."""
    operations: list[Operation] = field(default_factory=list)
    _sums: GradientSums = field(init=False)
    _column: int = 0
    """The number of the running backward pass."""
    _last: bool = False
    """Whether the gradients received so far are multiplied by local errors, and freed, in the running backward pass."""
    _final: bool = False
    _measured: int = 0
    _to_measure: int = 0
    _carrying: bool = False
    """Whether a backward pass of the scan is running. In those of the model itself, the hooks only add to `differentiated`."""

    def run(self, main: torch.Tensor, probes: OutputProbes, calls: list[TopKCall], seed: int) -> GradientSums:
        """Run all backward passes through `operations`: first those that start at the margins of routers (`calls`), then those that
        start at the main output (`main`), from `probes`. Returns the sums of gradients times local errors. seed: for the random
        signs with which the margins' gradients are drawn. Raises NoForward, KernelError, Cancelled.
        """
        self._sums = sums = GradientSums(probes.count, len(calls), self.file)
        signs = torch.Generator().manual_seed(seed)
        for number, call in enumerate(calls):
            self._column = probes.count + number
            probe = torch.randint(0, 2, call.margins.shape, generator=signs).mul_(2).sub_(1)
            finite = torch.isfinite(call.margins.detach())
            self._carry_back(call.margins, probe.to(call.margins) * finite, True)
        held = sum(output.nbytes for operation in self.operations for output in operation.outputs)
        # The sums do not depend on how many gradients are held at a time, and so not on the memory that is free.
        group = max(1, min(probes.count, 1 + self.budget // 2 // max(1, held)))
        self._to_measure = len(self.operations) * -(-probes.count // group)
        for number, probe in enumerate(probes):
            self._last = number % group == group - 1 or number == probes.count - 1
            self._column = number
            self._final = number == probes.count - 1
            self._carry_back(main, probe, not self._final)
            if self._last:
                waiting = sums.waiting if self._final else ()
                for operation in self.operations:
                    if id(operation) in waiting or any(operation.gradients):
                        self._measure(operation)
        return sums

    def on_gradient(self, operation: Operation, index: int, gradient: torch.Tensor | None) -> None:
        """Receive the gradient with respect to the output `index` of an operation, from a hook of torch."""
        if gradient is None:
            return  # on CUDA, torch calls the hook of an output of a recurrent layer that the loss does not depend on
        if not self._carrying:
            self.differentiated.update(operation.weights)
            return
        operation.gradients[index].append((self._column, gradient.detach().reshape(-1)))
        if self._last and len(operation.outputs) == 1:
            self._measure(operation)

    def enter_block(self, name: str) -> None:
        """Begin to use the weights of another block (`name`) of a model larger than memory. Must be called before they are read."""
        memory = self.runner.model.memory
        if self.file is not None and memory.limited and memory.inside != name:
            self.file.end_block()  # other sequences may run before this one goes on
        self.runner.enter_block(name)

    def _carry_back(self, output: torch.Tensor, gradient: torch.Tensor, retain_graph: bool) -> None:
        try:
            self._carrying = True
            # In this thread: another, which torch would start for an accelerator, is not set up for it.
            with foreign_code(), torch.autograd.set_multithreading_enabled(False):
                torch.autograd.backward(output, gradient, retain_graph=retain_graph)
        except (Cancelled, UserError):
            raise
        except (RuntimeError, NotImplementedError) as error:
            text = " ".join(str(error).split())[:300]
            raise NoForward(
                f"the scan's backward pass failed: {text}; scan --exact measures each weight without one"
            ) from error
        finally:
            self._carrying = False
            if self.file is not None:
                self.file.end_block()

    def _measure(self, operation: Operation) -> None:
        """Add the products of an operation's gradients and its local errors, and release the gradients."""
        if self.runner.cancelled():
            raise Cancelled
        if isinstance(operation, WeightOp) and operation.block:
            self.enter_block(operation.block)
        gradients_of = []
        for index, each in enumerate(operation.gradients):
            gradients_of.append(self._sums.gradients(each, (id(operation), index), self._final))
            each.clear()
        loaded = operation.loaded(self.file) if isinstance(operation, WeightOp) else operation
        for weight in loaded.weights:
            costly = self.costly.get(weight, ())
            if not costly:
                continue
            if isinstance(loaded, CacheWrite):
                errors_of = loaded.errors(costly, self.runner.amax_of("reference"))
            else:
                with stopping(self.runner.cancelled):  # casts of a large weight to all dtypes take many seconds
                    errors_of = self.local.of(loaded, weight, costly)
            for gradients, errors in zip(gradients_of, errors_of, strict=True):
                if gradients is not None:
                    self._sums.add(weight, errors, gradients)
        self._measured += 1
        self.on_measured(self._measured, self._to_measure)
