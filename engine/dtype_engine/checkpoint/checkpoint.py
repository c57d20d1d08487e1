"""A checkpoint as its headers describe it: the tensors under the names that the model gives them, and the module tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from dtype_engine.checkpoint.file_identity import FileIdentity
from dtype_engine.checkpoint.kv_cache import kv_cache
from dtype_engine.checkpoint.packed_weights import NOT_CODES, output_scales, parameters_meant, quantized_parts
from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes import CODES, CodedWeight
from dtype_engine.checkpoint.schemes.own import read as read_own
from dtype_engine.checkpoint.token_reads import token_reads
from dtype_engine.checkpoint.weight_sets import WeightSet, is_diffusers, several_sets
from dtype_engine.core import dtypes
from dtype_engine.core.draft_heads import DraftHead, draft_head
from dtype_engine.core.errors import UserError
from dtype_engine.core.gc_pause import gc_paused
from dtype_engine.core.tree import TensorInfo, Tree, from_tensors

if TYPE_CHECKING:
    from dtype_engine.checkpoint.completeness import IndexReport
    from dtype_engine.checkpoint.components import Component
    from dtype_engine.checkpoint.provenance import Provenance

Form = Literal["safetensors", "pickle", "gguf", "diffusers", "adapter"]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, slots=True)
class Merged:
    """An adapter, and what it does to its base."""

    adapter: Checkpoint
    weights: Mapping[str, CodedWeight]
    """The weights of the base that the adapter changes or replaces, by name."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: the headers of its files and its configuration, but not the weights."""

    path: Path
    """The folder or file that was opened."""
    files: tuple[Path, ...]
    """The files that hold the weights."""
    tensors: dict[str, CheckpointTensor]
    """Every tensor by its name in the files, in the files' order."""
    config: dict[str, Any] | None = None
    """The contents of `config.json`, or None if there is no such file."""
    metadata: dict[str, str] = field(default_factory=dict)
    """The merged metadata of all safetensors headers, or the fields `general.*` and `quantize.*` of a GGUF header."""
    form: Form = "safetensors"
    """The form of the files, which decides how they are read."""
    values: Mapping[str, Any] | None = None
    """The values of the tensors in pickles, by name, since a pickle is only read as a whole. None for other files."""
    base: str | None = None
    """The base of a PEFT adapter, whether it is merged or alone: "an unnamed model" if its files do not say it. None for other
    checkpoints.
    """
    alone: str = ""
    """Why a PEFT adapter is not merged into its base, as words that follow a colon. "" for other checkpoints."""
    merged: Merged | None = None
    """The PEFT adapter that is merged into this checkpoint, its base, or None."""
    notices: tuple[str, ...] = ()
    """Sentences about the checkpoint that the user should see."""
    identities: tuple[FileIdentity, ...] = ()
    """The state of each weights file before anything was read, to detect later changes."""
    components: tuple[Component, ...] = ()
    """The components of a diffusers pipeline that have weights, such as the UNet."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Maps each further name of a tied weight to its name in `tensors`, as pickles and the metadata of safetensors tell it."""
    index: IndexReport | None = None
    """How the checkpoint's index differs from its shards, or None if it has no index."""
    read_by: WeightSet | None = None
    """The set of weights in the folder that was opened; None for single files and pipelines."""
    passed_over: tuple[str, ...] = ()
    """The other weights in the folder, in words for the user. transformers (or diffusers) does not load them."""
    in_config: frozenset[str] = frozenset()
    """Names of tensors whose values are entries of `config`: the factors of a rotary embedding in a GGUF file."""
    lost: tuple[str, ...] = ()
    """Sentences about the entries of a GGUF file that change what the model computes, and that neither `config` nor the weights can
    hold. If there are any, the model is not run or exported, because it would compute other outputs.
    """
    headers_alone: str = ""
    """A sentence for the user if the values are only on a hub, with the way to download them. "" if the values are here."""

    @property
    def folder(self) -> Path:
        """The folder of the files. It may hold other models, too, if `path` is a single file."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def of_sets(self) -> tuple[str, ...]:
        """One sentence for the user if the folder has more weights than those that are read, otherwise ()."""
        if self.read_by is None or not self.passed_over:
            return ()
        return (several_sets(self.read_by, self.passed_over, self.config),)

    @property
    def of_transformers(self) -> bool:
        """Whether transformers can load an export of this checkpoint: it is a whole model with a config.json, and not one of
        diffusers.
        """
        return (
            self.config is not None and self.form in ("safetensors", "pickle", "gguf") and not is_diffusers(self.config)
        )

    @cached_property
    def coded(self) -> dict[str, CodedWeight]:
        """The weights that the files store as codes and that can be decoded, by their names in the unquantized checkpoint. Empty
        for pickles. Raises UserError if a tensor that describes a weight can't be read, or if the metadata of an export is wrong.
        """
        if self.form == "gguf":
            return self._of_gguf[0]
        found = dict(self._own)
        may_have = self.form in ("safetensors", "diffusers")
        if may_have and any(tensor.dtype not in NOT_CODES for tensor in self.foreign.values()):
            from dtype_engine.checkpoint.schemes.registry import read_coded  # most checkpoints are shown without it

            if self.form == "safetensors":
                found |= read_coded(self.foreign, self.config, self.metadata)
            for part in (
                self.components
            ):  # each is a checkpoint of its own, without the prefix in its configuration and metadata
                start = len(part.prefix)
                own = {name[start:]: tensor for name, tensor in self.foreign.items() if name.startswith(part.prefix)}
                for name, weight in read_coded(own, part.config, part.metadata).items():
                    found[part.prefix + name] = replace(weight, name=part.prefix + name)
        found |= self.merged.weights if self.merged is not None else {}
        return found | {alias: found[first] for alias, first in self.aliases.items() if first in found}

    @cached_property
    def _own(self) -> dict[str, CodedWeight]:
        return read_own(self.path, self.tensors, self.metadata)

    @property
    def renamed(self) -> Mapping[str, str]:
        """Maps tensors' names in a GGUF file to the model's names, such as `output_norm.weight` to `model.norm.weight`. Tensors
        that must be decoded are in `coded` instead.
        """
        return self._of_gguf[1]

    @cached_property
    def _of_gguf(self) -> tuple[dict[str, CodedWeight], dict[str, str]]:
        if self.form != "gguf":
            return {}, {}
        from dtype_engine.checkpoint.gguf_model import read  # the first screen of other checkpoints does not need it

        return read(self.tensors, self.config)

    @cached_property
    def provenance(self) -> Provenance:
        """What the files say about how the weights were quantized."""
        from dtype_engine.checkpoint.provenance import provenance  # the first screen needs no YAML parser

        return provenance(self.folder, self.config, self.metadata)

    @cached_property
    @gc_paused()
    def weights(self) -> dict[str, CheckpointTensor]:
        """The tensors, keyed by the names that the model gives them. A tied weight appears under each of its names. A weight in
        `coded` appears as one tensor of the weight's shape. Its `nbytes` is the sum over its parts, without parts that it shares
        with an earlier weight.
        """
        besides = self.owners.keys() | self.in_config
        of_codes: dict[str, list[CheckpointTensor]] = {}
        counted = set[tuple[str, int | None]]()
        for name, weight in self.coded.items():
            if name in self.aliases:
                continue
            nbytes = 0
            for part in weight.tensors:
                if (part.name, part.start) not in counted:
                    counted.add((part.name, part.start))
                    nbytes += part.nbytes
            codes = weight.parts[CODES]
            whole = CheckpointTensor(name, weight.shape, weight.format, codes.file, None, nbytes, packed=True)
            of_codes.setdefault(codes.name, []).append(whole)
        found, renamed = {}, self.renamed
        for name, tensor in self.tensors.items():
            if name not in besides:
                found[renamed.get(name, name)] = tensor
            for header in of_codes.get(name, ()):
                found[header.name] = header
        return found | {alias: found[first] for alias, first in self.aliases.items()}

    @cached_property
    def draft(self) -> DraftHead:
        """The layers that predict several tokens at once, by the tensors' names. A class of the model may use them nevertheless."""
        return draft_head(self.weights, self.config)

    def dtype(self, name: str) -> str:
        """Return the dtype in which the weight `name` of `weights` is stored. It ends in `@tensor` if all values share a scale."""
        return self.weights[name].dtype

    @property
    def decoded_dtype(self) -> str:
        """The dtype that the quantized weights would have in an unquantized model: the one that config.json names for the whole
        model or, failing that, for its text part, otherwise the widest compute dtype of the checkpoint's tensors.
        """
        config = self.config or {}
        text = config.get("text_config")
        for place in (config, text if isinstance(text, Mapping) else {}):
            named = str(place.get("dtype") or place.get("torch_dtype")).removeprefix("torch.")
            if named in dtypes.COMPUTE_DTYPES:
                return named
        return dtypes.widest(map(self.dtype, self.weights))

    @cached_property
    def owners(self) -> dict[str, str]:
        """Maps each tensor that belongs to a weight in `coded`, such as its scales, to the first such weight."""
        found: dict[str, str] = {}
        for name, weight in self.coded.items():
            for tensor in weight.tensors:
                found.setdefault(tensor.name, name)
        return found

    def names_of(self, tensor: TensorInfo) -> tuple[str, ...]:
        """Return the keys in `weights` of the stored tensors that hold the values of a tensor of the module tree. There are several
        keys if the model packs several stored tensors into one, and none if the files lack the tensor.
        """
        return tensor.stored_as or tuple(name for name in tensor.names if name in self.weights)[:1]

    def tree(self) -> Tree:
        """Return the module tree, built from the tensor names. Module classes are unknown, and the only ties are `aliases`."""
        unread, own = self.unread, {name for name, weight in self.coded.items() if weight.own}
        parts = output_scales(unread) | quantized_parts(unread, self.config)
        further: dict[str, tuple[str, ...]] = {}
        for alias, first in self.aliases.items():
            further[first] = (*further.get(first, ()), alias)
        meant = parameters_meant(unread, parts)
        with gc_paused():
            tree = from_tensors(
                TensorInfo(
                    name,
                    tensor.shape,
                    tensor.dtype,
                    "buffer" if name.endswith(_BUFFERS) else "parameter",
                    further.get(name, ()),
                    packed_bytes=tensor.nbytes
                    if (tensor.packed or tensor.refusal is not None) and name not in own
                    else None,
                    uncastable_reason=tensor.refusal or parts.get(name),
                    own_codes=name in own,
                    logical_numel=meant.get(name),
                )
                for name, tensor in self.weights.items()
                if name not in self.aliases
            )
            tree.draft = self.draft
            tree.kv_cache = kv_cache(tree, self.config)
            tree.token_reads = token_reads(tree, self.config)
            return tree

    @property
    def foreign(self) -> dict[str, CheckpointTensor]:
        """All tensors in the files by name, except those of an adapter and those in which an export of this program stored weights
        with scales.
        """
        own = {part.name for weight in self._own.values() for part in weight.tensors}
        own |= self.merged.adapter.tensors.keys() if self.merged is not None else set()
        return {name: tensor for name, tensor in self.tensors.items() if name not in own} if own else self.tensors

    @property
    def unread(self) -> dict[str, CheckpointTensor]:
        """The tensors in `foreign` that belong to no weight in `coded`: plain ones, and parts of weights that can't be decoded."""
        return {name: tensor for name, tensor in self.foreign.items() if name not in self.owners}

    @property
    def why_another_model(self) -> str:
        """Why the model would compute other outputs: the first sentence of `lost` and the number of the others, or "" if `lost` is
        empty.
        """
        more = f" (and {len(self.lost) - 1} more)" if len(self.lost) > 1 else ""
        return self.lost[0] + more if self.lost else ""

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notices except those about the index and about further sets of weights, which commands report in other ways."""
        elsewhere = (*(self.index.sentences if self.index is not None else ()), *self.of_sets)
        return tuple(notice for notice in self.notices if notice not in elsewhere)

    def need_values(self) -> None:
        """Raise UserError if the values of the tensors are not on this machine."""
        if self.headers_alone:
            raise UserError(self.headers_alone)

    @property
    def stored_bytes(self) -> int:
        """The total bytes of all tensors as stored. A tied weight is counted once."""
        return sum(tensor.nbytes for name, tensor in self.tensors.items() if name not in self.aliases)
