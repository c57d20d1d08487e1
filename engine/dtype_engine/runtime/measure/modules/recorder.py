"""Records the module outputs of a reference run, for comparison with those of a candidate."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

from dtype_engine.runtime.libraries.torch_private import version_of
from dtype_engine.runtime.measure.modules.routing import is_router
from dtype_engine.runtime.passes.forward_pass import ModuleObserver

T = TypeVar("T")


class SeenOutput(Generic[T]):
    """A module's output with a result computed from it. The next module may return the same output or a view of all of it, as a
    parent often returns its last child's output. The result is then used again. This object keeps the output alive, so that its
    memory is not used for another tensor.
    """

    def __init__(self, output: torch.Tensor, result: T) -> None:
        self.output = output
        self.result = result
        self.version = version_of(output)

    def is_same(self, output: torch.Tensor) -> bool:
        """Return whether `output` is this object's output or a view of all of it, and nothing has written to its memory since."""
        if self.version != version_of(self.output):
            return False
        return self.output is output or (
            self.output.data_ptr() == output.data_ptr()
            and self.output.shape == output.shape
            and self.output.stride() == output.stride()
            and self.output.dtype == output.dtype
            and self.version == version_of(output)
        )


class ModuleRecorder(ModuleObserver):
    """Keeps a copy of every module output during a reference pass, up to `budget` bytes in total. Outputs are copied at once,
    because the model may overwrite them later. Modules that return the same tensor share one copy.
    """

    def __init__(self, budget: int) -> None:
        self.outputs: dict[tuple[str, int], torch.Tensor] = {}
        """The recorded outputs, keyed by the name of the module and the number of its call, from 0."""
        self.left_out: set[str] = set()
        """Names of modules with an output that exceeded the budget."""
        self.choices: dict[tuple[str, int], torch.Tensor] = {}
        """The experts that routers chose, as integers, keyed by the name of the router and the number of its call."""
        self._budget = self._left = budget
        self._last: SeenOutput[torch.Tensor | None] | None = None

    def __call__(self, module: str, call: int, output: torch.Tensor) -> None:
        if self._last is None or not self._last.is_same(output):
            copied: torch.Tensor | None = None
            if output.nbytes <= self._left:
                copied = output.detach().clone()
                self._left -= copied.nbytes
            self._last = SeenOutput(output, copied)
        copied = self._last.result
        if copied is None:
            self.left_out.add(module)
        else:
            self.outputs[module, call] = copied

    def take_choice(self, module: str, call: int, chosen: torch.Tensor) -> None:
        if is_router(module):
            self.choices[module, call] = chosen.clone()

    def copy_of(self, output: torch.Tensor) -> torch.Tensor:
        """Return a copy of the main output. If the last module returned it, as is usual for logits, this is the recorded copy."""
        if self._last is not None and self._last.result is not None and self._last.is_same(output):
            return self._last.result
        return output.detach().clone()
