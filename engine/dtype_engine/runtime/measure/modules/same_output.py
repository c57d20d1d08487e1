"""Whether two modules returned the very same output."""

from __future__ import annotations

import torch

from dtype_engine.runtime.model.torch_private import version_of


class SeenOutput:
    """An output, by which another module's is known again: a parent's is often that of the module that it called last, or a view
    of all of it. It is held here, so that no other tensor can take its memory.
    """

    __slots__ = ("output", "version")

    def __init__(self, output: torch.Tensor) -> None:
        self.output = output
        self.version = version_of(output)

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing has written to it since."""
        return self.version == version_of(self.output)

    def is_same(self, output: torch.Tensor) -> bool:
        """Whether this holds the same values at the same places, and nothing has written to it since."""
        if not self.is_unchanged:
            return False
        return self.output is output or (
            self.output.data_ptr() == output.data_ptr()
            and self.output.shape == output.shape
            and self.output.stride() == output.stride()
            and self.output.dtype == output.dtype
            and self.version == version_of(output)
        )
