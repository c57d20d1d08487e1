"""What the headers of a checkpoint say: its tensors by the names that the model has for them, and the tree of them."""

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
    """What a checkpoint's headers say: every tensor by name, in the files' order, and `config.json` where there is
    one.

    form: which reader its files need. values: the tensors themselves where reading the headers already mapped them
    (pickles). base: the model that an adapter was made for. notices: what a user should know, a sentence each. identities: the
    files with weights as they were before anything of them was read. components: the folders of a diffusers pipeline that have
    weights. aliases: names that stand for the very same tensor as another, and that other's name (tied weights of a pickle, or
    of a file written by safetensors' `save_model`).
    """

    path: Path
    files: tuple[Path, ...]
    tensors: dict[str, CheckpointTensor]
    config: dict[str, Any] | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    form: Form = "safetensors"
    values: Mapping[str, Any] | None = None
    base: str | None = None
    notices: tuple[str, ...] = ()
    identities: tuple[FileIdentity, ...] = ()
    components: tuple[Component, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    index: IndexReport | None = None
    """How the index of its shards agrees with them; None where there is no index."""

    @cached_property
    def quantized(self) -> dict[str, QuantizedWeight]:
        """Tensors that an export of this program stored with scales, by the name that the model has for them.

        Raises UserError where the file's own account of them does not agree with its tensors.
        """
        own = read_quantized(self.path, self.tensors, self.metadata)
        return own | {alias: own[first] for alias, first in self.aliases.items() if first in own}

    @cached_property
    def weights(self) -> dict[str, CheckpointTensor]:
        """The tensors by the names that the model has for them, tied ones under each of theirs. Scales are left out, as they
        belong to their weight.
        """
        own = {tensor.data.name: name for name, tensor in self.quantized.items() if name not in self.aliases}
        besides = self._own_parts - own.keys()
        found = {own.get(name, name): tensor for name, tensor in self.tensors.items() if name not in besides}
        for name in own.values():
            if found[name].shape != self.quantized[name].shape:  # its codes are packed
                found[name] = dataclasses.replace(found[name], shape=self.quantized[name].shape)
        return found | {alias: found[first] for alias, first in self.aliases.items()}

    def dtype(self, name: str) -> str:
        """The dtype of one of `weights`: a name of `dtypes`, `@tensor` included."""
        weight = self.quantized.get(name)
        return weight.dtype if weight is not None else self.weights[name].dtype

    def names_of(self, tensor: TensorInfo) -> tuple[str, ...]:
        """The names in `weights` of a tensor of a tree: several where it is packed of several, none where the files lack it."""
        return tensor.stored_as or tuple(name for name in tensor.names if name in self.weights)[:1]

    def tree(self) -> Tree:
        """The tree of its tensor names. Module classes are not known from headers, ties only where a pickle has one storage
        under several names.
        """
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
                    meant=meant.get(name),
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
        """Names of the data and the scales of `quantized`, as the files have them."""
        return {part.name for weight in self.quantized.values() for part in weight.tensors}

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors, as stored, tied ones once."""
        return sum(tensor.nbytes for name, tensor in self.tensors.items() if name not in self.aliases)


def _kind(name: str) -> Kind:
    return "buffer" if name.endswith(_BUFFERS) else "parameter"
