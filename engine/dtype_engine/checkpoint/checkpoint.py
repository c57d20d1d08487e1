"""A checkpoint as its headers describe it: its tensors under the names that the model gives them, and their tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from dtype_engine.checkpoint.completeness import IndexReport
from dtype_engine.checkpoint.components import Component
from dtype_engine.checkpoint.file_identity import FileIdentity
from dtype_engine.checkpoint.packed_weights import quantized_parts
from dtype_engine.checkpoint.parameter_counts import parameters_meant
from dtype_engine.checkpoint.prequantized import QuantizedWeight, read_quantized
from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.core.gc_pause import gc_paused
from dtype_engine.core.tree import Kind, TensorInfo, Tree, from_tensors

Form = Literal["safetensors", "pickle", "gguf", "diffusers", "adapter"]


_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was opened: the headers of its files and its configuration, and no weight."""

    path: Path
    """The folder or the file that was opened."""
    files: tuple[Path, ...]
    """The files that hold the weights."""
    tensors: dict[str, CheckpointTensor]
    """Every tensor by its name in the files, in the files' order."""
    config: dict[str, Any] | None = None
    """The contents of `config.json`; None where there is no such file."""
    metadata: dict[str, str] = field(default_factory=dict)
    """The metadata of all safetensors headers together."""
    form: Form = "safetensors"
    """The kind of reader that the files need."""
    values: Mapping[str, Any] | None = None
    """The tensors themselves, where reading the headers mapped them already (pickles)."""
    base: str | None = None
    """The model that an adapter was made for."""
    notices: tuple[str, ...] = ()
    """What a user should know, a sentence each."""
    identities: tuple[FileIdentity, ...] = ()
    """The state of each file of weights before anything was read from it."""
    components: tuple[Component, ...] = ()
    """The folders with weights of a diffusers pipeline."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of tied weights, each with the name of the tensor in `tensors`. Pickles, and files that safetensors'
    `save_model` wrote, have them."""
    index: IndexReport | None = None
    """How the index of its shards agrees with them; None where there is no index."""

    @cached_property
    def quantized(self) -> dict[str, QuantizedWeight]:
        """The weights that an export of this program stored with scales, under the names that the model gives them.

        Raises UserError where the metadata of the file does not agree with its tensors.
        """
        own = read_quantized(self.path, self.tensors, self.metadata)
        return own | {alias: own[first] for alias, first in self.aliases.items() if first in own}

    @cached_property
    def weights(self) -> dict[str, CheckpointTensor]:
        """The tensors under the names that the model gives them; a tied weight under each of its names. Scales are left out, since
        they belong to a weight.
        """
        own = {tensor.data.name: name for name, tensor in self.quantized.items() if name not in self.aliases}
        besides = self._own_parts - own.keys()
        found = {own.get(name, name): tensor for name, tensor in self.tensors.items() if name not in besides}
        for name in own.values():
            if found[name].shape != self.quantized[name].shape:  # its codes are packed
                found[name] = dataclasses.replace(found[name], shape=self.quantized[name].shape)
        return found | {alias: found[first] for alias, first in self.aliases.items()}

    def dtype(self, name: str) -> str:
        """The dtype of a tensor of `weights`, as `core.dtypes` names it, with `@tensor` where it applies."""
        weight = self.quantized.get(name)
        return weight.dtype if weight is not None else self.weights[name].dtype

    def names_of(self, tensor: TensorInfo) -> tuple[str, ...]:
        """The names in `weights` of a tensor of a tree: several where loading packs several tensors into it, none where the files
        lack it.
        """
        return tensor.stored_as or tuple(name for name in tensor.names if name in self.weights)[:1]

    def tree(self) -> Tree:
        """The tree of the tensor names. Headers do not name module classes, and only `aliases` name ties."""
        parts = quantized_parts(self.foreign, self.config)
        further: dict[str, tuple[str, ...]] = {}
        for alias, first in self.aliases.items():
            further[first] = (*further.get(first, ()), alias)
        meant = parameters_meant(self.foreign, parts, self.config)
        with gc_paused():
            return from_tensors(
                TensorInfo(
                    name,
                    tensor.shape,
                    self.dtype(name),
                    _kind(name),
                    further.get(name, ()),
                    packed_bytes=tensor.nbytes if tensor.packed or tensor.refusal is not None else None,
                    uncastable_reason=tensor.refusal or parts.get(name),
                    quantized=name in self.quantized,
                    logical_numel=meant.get(name),
                )
                for name, tensor in self.weights.items()
                if name not in self.aliases
            )

    @property
    def foreign(self) -> dict[str, CheckpointTensor]:
        """The tensors of the files without the data and the scales of `quantized`."""
        own = self._own_parts
        return {name: tensor for name, tensor in self.tensors.items() if name not in own} if own else self.tensors

    @property
    def _own_parts(self) -> set[str]:
        """The names in the files of all tensors that belong to `quantized`."""
        return {part.name for weight in self.quantized.values() for part in weight.tensors}

    @property
    def stored_bytes(self) -> int:
        """The bytes of all tensors as stored; a tied weight counts once."""
        return sum(tensor.nbytes for name, tensor in self.tensors.items() if name not in self.aliases)


def _kind(name: str) -> Kind:
    return "buffer" if name.endswith(_BUFFERS) else "parameter"
