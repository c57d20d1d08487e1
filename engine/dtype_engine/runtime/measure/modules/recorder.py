"""The module outputs of a reference pass, kept to compare a candidate's with.

An output is the first floating tensor that a module's call returned, of any shape; calls of a module are counted from 0.
"""

from __future__ import annotations

import torch

from dtype_engine.runtime.model.torch_private import version_of
from dtype_engine.runtime.passes.forward_pass import ModuleObserver


class _SeenOutput:
    """An output, by which another module's is known again: a parent's is often that of the module that it called last, or a view
    of all of it. It is held here, so that no other tensor can take its memory.
    """

    __slots__ = ("copied", "output", "version")

    def __init__(self, output: torch.Tensor, copied: torch.Tensor | None) -> None:
        self.output = output
        self.copied = copied
        self.version = version_of(output)

    def is_same(self, output: torch.Tensor) -> bool:
        """Whether this holds the same values at the same places, and nothing has written to it since."""
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
    """Observes a reference pass: keeps a copy of every module output, up to `budget` bytes.

    A copy at once, since a model may write to an output after the module returned it. Modules that returned the very same tensor,
    as a parent and the last module it called, share one.
    """

    def __init__(self, budget: int) -> None:
        self.outputs: dict[tuple[str, int], torch.Tensor] = {}
        """By (module, call)."""
        self.left_out: set[str] = set()
        """The modules with an output that did not fit."""
        self._budget = self._left = budget
        self._last: _SeenOutput | None = None

    def __call__(self, module: str, call: int, output: torch.Tensor) -> None:
        if self._last is None or not self._last.is_same(output):
            copied: torch.Tensor | None = None
            if output.nbytes <= self._left:
                copied = output.detach().clone()
                self._left -= copied.nbytes
            self._last = _SeenOutput(output, copied)
        copied = self._last.copied
        if copied is None:
            self.left_out.add(module)
        else:
            self.outputs[module, call] = copied

    def restart(self) -> None:
        """Forget all that was kept."""
        self.outputs.clear()
        self.left_out.clear()
        self._left, self._last = self._budget, None

    def copy_of(self, output: torch.Tensor) -> torch.Tensor:
        """A copy of the main output: the one that is kept of the last module's, where it is the very same. Logits mostly are, and
        are the largest output of a model with a large vocabulary.
        """
        if self._last is not None and self._last.copied is not None and self._last.is_same(output):
            return self._last.copied
        return output.detach().clone()
