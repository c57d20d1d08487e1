"""Recognizes when two modules return the same tensor. A parent often returns its last child's output, or a view of all of it."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

from dtype_engine.runtime.libraries.torch_private import version_of

T = TypeVar("T")


class SeenOutput(Generic[T]):
    """A module's output with a result computed from it, such as a copy of it or its comparison with the reference run. The result
    is used again if the next module returns the same output. This object keeps the output alive, so that its memory is not used for
    another tensor.
    """

    __slots__ = ("output", "result", "version")

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
