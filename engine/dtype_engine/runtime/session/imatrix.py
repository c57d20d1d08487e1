"""Makes the file of importance that `llama-quantize --imatrix` reads, of the statistics that `:imatrix` takes.

It is a GGUF file as `llama-imatrix` writes it (`tools/imatrix/imatrix.cpp`): for each GGUF tensor NAME, `NAME.in_sum2` has the sum
of x² for each input channel, [experts, channels], and `NAME.counts` the number of inputs x, [experts, 1]. llama-quantize divides
one by the other, and takes 1 for an expert that got no input.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch

from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.llama_types import IMATRIX, LLAMA_TYPES
from dtype_engine.recipe.targets.base import Context
from dtype_engine.recipe.targets.llama_cpp import gguf_tensors
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.roundings import InputStatistics, WeightStatistics
from dtype_engine.runtime.session.saved_statistics import SavedStatistics

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ANY = next(f"{row.name}:{IMATRIX}" for row in LLAMA_TYPES.values() if row.imatrix == "used")
"""A dtype that needs the statistics which the file has."""


@dataclass(slots=True)
class _Entry:
    """The statistics of a GGUF tensor."""

    experts: int = 1
    parts: dict[int, InputStatistics] = field(default_factory=dict)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the sums [experts, channels], the numbers of inputs [experts, 1]), float32."""
        channels = len(next(iter(self.parts.values())).squares)
        sums, counts = torch.zeros(self.experts, channels), torch.zeros(self.experts, 1)
        for index, part in self.parts.items():
            sums[index], counts[index] = part.sums.cpu(), part.tokens
        return sums, counts


def imatrix_file(model: LiveModel, context: Context, statistics: SavedStatistics, cancelled: IsCancelled) -> bytes:
    """Return the content of the file, for all weights that have a name in GGUF and that a matrix product of the model uses.

    context: the model's tree, and what decides the names in GGUF. statistics: collects them. Raises UserError for an architecture
    that GGUF does not know, NoForward, KernelError, Cancelled.
    """
    names = gguf_tensors(context)
    wanted = {name: _ANY for name, weight in model.weights.items() if names.get(name) and len(weight.stored.shape) > 1}
    entries: dict[str, _Entry] = {}
    for collected in statistics.collect(wanted, ignore, cancelled):
        for name, found in collected.items():
            for gguf_name in names[name]:
                _add(entries.setdefault(gguf_name, _Entry()), name, model.weights[name].stored.shape, found)
    return _written({name: entry for name, entry in entries.items() if entry.parts}, statistics.calibration.inputs)


def _add(entry: _Entry, name: str, shape: tuple[int, ...], found: WeightStatistics) -> None:
    expert = _EXPERT.search(name)
    for index, part in found.parts.items():
        number = int(expert[1]) if expert else index or 0
        entry.parts[number] = part
        entry.experts = max(entry.experts, number + 1, shape[0] if len(shape) > 2 else 1)


def _written(entries: Mapping[str, _Entry], inputs: Inputs) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "imatrix.gguf"
        writer = gguf.GGUFWriter(path, "")
        writer.add_type(IMATRIX)
        writer.add_array("imatrix.datasets", [inputs.description])
        writer.add_uint32("imatrix.chunk_count", len(inputs.batches))
        writer.add_uint32("imatrix.chunk_size", _tokens(inputs))
        for name in sorted(entries):
            for suffix, rows in zip((".in_sum2", ".counts"), entries[name].rows(), strict=True):
                writer.add_tensor(name + suffix, rows.numpy().astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def _tokens(inputs: Inputs) -> int:
    """Return the number of tokens of the first input, or 1 if it has none."""
    ids = inputs.batches[0].kwargs.get("input_ids") if inputs.batches else None
    return int(ids.shape[-1]) if isinstance(ids, torch.Tensor) else 1
