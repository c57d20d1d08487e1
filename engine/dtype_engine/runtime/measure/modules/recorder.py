"""The module outputs of a reference pass, kept to compare a candidate's with.

An output is the first floating tensor that a module's call returned, of any shape; calls of a module are counted from 0.
"""

from __future__ import annotations

import torch

from dtype_engine.runtime.measure.modules.routing import is_router
from dtype_engine.runtime.measure.modules.seen_output import SeenOutput
from dtype_engine.runtime.passes.forward_pass import ModuleObserver


class ModuleRecorder(ModuleObserver):
    """Observes a reference pass: keeps a copy of every module output, up to `budget` bytes.

    A copy at once, since a model may write to an output after the module returned it. Modules that returned the very same tensor,
    as a parent and the last module it called, share one.
    """

    def __init__(self, budget: int) -> None:
        self.outputs: dict[tuple[str, int], torch.Tensor] = {}
        """By (module, call)."""
        self.left_out: set[str] = set()
        """The modules with an output that did not fit."""
        self.choices: dict[tuple[str, int], torch.Tensor] = {}
        """The experts that routers chose, integers, by (module, call)."""
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

    def restart(self) -> None:
        """Forget all that was kept."""
        self.choices.clear()
        self.outputs.clear()
        self.left_out.clear()
        self._left, self._last = self._budget, None

    def copy_of(self, output: torch.Tensor) -> torch.Tensor:
        """A copy of the main output: the one that is kept of the last module's, where it is the very same. Logits mostly are, and
        are the largest output of a model with a large vocabulary.
        """
        if self._last is not None and self._last.result is not None and self._last.is_same(output):
            return self._last.result
        return output.detach().clone()
