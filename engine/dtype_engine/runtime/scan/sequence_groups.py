"""Decides which sequences are scanned side by side, and whether their activations are written to a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dtype_engine.runtime.device import cache_budget
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.model_behavior import ModelBehavior
from dtype_engine.runtime.weights.temporary_file import free_for_temporary_files

_SIDE_BY_SIDE = 8
"""The maximum number of sequences of a model larger than memory that are scanned side by side."""
_GRAPH_BYTES = 5
"""An estimate of the bytes of an autograd graph for each token and each row and column of a weight's matrix: 4 for the inputs and
outputs of products in float32, and 1 for what lies between them. A Llama with its sums, norms and attention has 4.7.
"""
_OUTPUT_BYTES = 16
"""About how many bytes a sequence takes for each element of its main output: output, probes and gradients in float32."""
_FILE_BYTES = 1.5
"""The maximum size of a file with activations and sums of squared gradients, divided by the size of the autograd graph."""


@dataclass
class SequenceGroups:
    """Groups the sequences of `inputs` by the memory that is free and by the sizes of the sequences that were scanned before."""

    model: LiveModel
    inputs: Inputs
    behavior: ModelBehavior
    _bytes_per_element: float | None = None
    """How many bytes of an autograd graph there are for each element of the largest input, as far as known."""
    _outputs_per_element: float | None = None
    """How many elements the main output has for each element of the largest input, as far as known."""

    @property
    def most(self) -> int:
        return 1 if not self.model.memory.limited else _SIDE_BY_SIDE

    def next(self, pending: list[int], backward_passes: int) -> tuple[list[int], bool]:
        """Return which of the sequences `pending` to scan side by side, and whether to write their activations to a file until the
        backward passes. For a model in memory this is one sequence, without a file.

        A model that is larger than memory is read once for each group of sequences and pass. Autograd graphs that are not in a file
        may take a quarter of the free memory. With a file, more sequences run side by side, but the file must also be written, and
        read in each backward pass. The way that reads and writes fewer bytes for each sequence is chosen.
        """
        if not self.model.memory.limited:
            return pending[:1], False
        one_by_one = self.behavior.stateful or bool(self.model.side_settings)
        room, most = cache_budget(self.model.device), pending[: 1 if one_by_one else self.most]
        graph, disk = self.graph_bytes(pending[0]), free_for_temporary_files() / _FILE_BYTES
        in_memory = _first_of(most, self.graph_bytes, room)
        if graph > disk or (len(in_memory) == len(most) and graph <= room):
            return in_memory, False
        in_file = _first_of(_first_of(most, self.graph_bytes, disk), self._bytes_beside_file, room)
        passes, weights = 1 + backward_passes, self.model.tree.stored_bytes
        graphs = sum(map(self.graph_bytes, in_file))
        if graph <= room and passes * weights / len(in_memory) <= passes * (weights + graphs) / len(in_file):
            return in_memory, False
        return in_file, True

    def graph_bytes(self, index: int) -> float:
        """Return about how many bytes the autograd graph of a sequence takes, in proportion to its largest input."""
        if self._bytes_per_element is None:
            shapes = (weight.info.shape for weight in self.model.weights.values())
            self._bytes_per_element = _GRAPH_BYTES * sum(shape[-1] + shape[-2] for shape in shapes if len(shape) > 1)
        return self._bytes_per_element * self._longest(index)

    def note(self, index: int, graph_bytes: int, elements: int) -> None:
        """Remember the approximate size in bytes of a sequence's autograd graph, and how many elements its main output had."""
        self._bytes_per_element = graph_bytes / max(1, self._longest(index))
        self._outputs_per_element = elements / max(1, self._longest(index))

    def _bytes_beside_file(self, index: int) -> float:
        """Return about how many bytes of memory a sequence takes if its activations are in a file: two blocks and the output."""
        per_element = self._outputs_per_element
        if per_element is None:
            per_element = max(weight.info.shape[0] for weight in self.model.weights.values() if weight.info.shape)
        output = _OUTPUT_BYTES * per_element * self._longest(index)
        return output + 2 * self.graph_bytes(index) / max(1, len(self.model.memory.blocks))

    def _longest(self, index: int) -> int:
        tensors = self.inputs.batches[index].named_tensors()
        return max((tensor.numel() for _, tensor in tensors), default=1)


def _first_of(indexes: list[int], nbytes: Callable[[int], float], room: float) -> list[int]:
    """Return as many of the first `indexes` as take at most `room` bytes, but at least one. nbytes: returns an index's bytes."""
    taken, total = list[int](), 0.0
    for index in indexes:
        total += nbytes(index)
        if taken and total > room:
            break
        taken.append(index)
    return taken
