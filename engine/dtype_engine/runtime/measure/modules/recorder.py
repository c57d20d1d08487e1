"""Records the module outputs of a reference run, for comparison with those of a candidate.

An output is the first float tensor that a module call returned, of any shape. The calls of each module are counted from 0.
"""

from __future__ import annotations

import torch

from dtype_engine.runtime.measure.modules.routing import is_router
from dtype_engine.runtime.measure.modules.seen_output import SeenOutput
from dtype_engine.runtime.passes.forward_pass import ModuleObserver


class ModuleRecorder(ModuleObserver):
    """Keeps a copy of every module output during a reference pass, up to `budget` bytes in total.

    Outputs are copied at once, because the model may overwrite them later. Modules that return the same tensor, such as a parent
    and the last child it calls, share one copy.
    """

    def __init__(self, budget: int) -> None:
        self.outputs: dict[tuple[str, int], torch.Tensor] = {}
        """The recorded outputs, keyed by the name of the module and the number of its call."""
        self.left_out: set[str] = set()
        """Names of modules that had an output which exceeded the memory budget and was not recorded."""
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
        """Return a copy of the main output. If the last module returned the same tensor, its recorded copy is shared: this is usual
        for logits, the largest output in a model with a large vocabulary.
        """
        if self._last is not None and self._last.result is not None and self._last.is_same(output):
            return self._last.result
        return output.detach().clone()
