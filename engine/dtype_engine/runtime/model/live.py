"""Holds a running `nn.Module`, whose tensors are cast in place and restored.

The `Parameter` objects stay in the module, and only their data changes. The stored data, usually memory-mapped, is kept as long as
the model exists. Every cast therefore starts from it, and undoing a cast copies nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import nn

from dtype_engine.checkpoint import Checkpoint, FileIdentity
from dtype_engine.checkpoint.kv_cache import declared_formats
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.draft_heads import NO_DRAFT
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.core.fused import scale_groups
from dtype_engine.core.kv_cache import STATES
from dtype_engine.core.system_memory import trim_heap
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree, draft_notice
from dtype_engine.results.coverage import Coverage
from dtype_engine.results.losses import ValueLoss
from dtype_engine.runtime.device import cache_budget, enough_memory, has_float64
from dtype_engine.runtime.libraries.torch_private import is_compiled, slots_of
from dtype_engine.runtime.model.device_map import Places, distribute
from dtype_engine.runtime.model.module_tree import collect_tensors, tree_of
from dtype_engine.runtime.model.name_mapping import Placement
from dtype_engine.runtime.model.rounder import Rounder
from dtype_engine.runtime.model.side_settings import SideSettings
from dtype_engine.runtime.model.stored_tree import with_files, with_unused
from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.weights.budget import BLOCKS, MemoryBudget
from dtype_engine.runtime.weights.source import PlainSource, WeightSource


def _move(module: nn.Module, move: Callable[[], object], originals: dict[int, torch.Tensor]) -> None:
    """Move a module to other devices by calling `move`. For some devices, torch replaces the tensor objects. Modules that shared
    an old object then share the new one. originals: maps the `id` of each old object to its data, and gets an entry for the `id`
    of each new one.
    """
    places: dict[int, list[tuple[dict[str, torch.Tensor | None], str]]] = {}
    for child in module.modules():
        for held in slots_of(child):
            for name, tensor in held.items():
                places.setdefault(id(tensor), []).append((held, name))
    move()
    moved: dict[int, torch.Tensor] = {}
    for key, ((held, name), *others) in places.items():
        for other, other_name in others:
            other[other_name] = held[name]
        if key in originals:
            moved[id(held[name])] = originals[key]
    originals.update(moved)  # not before the loop ends: a new object may have the `id` of an old one that is gone


def _refuse_unobservable(module: nn.Module, title: str, device: torch.device) -> None:
    """Raise UserError if tensors have no data, a part is compiled by TorchScript, or the device lacks the dtype of a tensor."""
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise UserError(f"{title}: some tensors have no data (they are on the meta device); load the weights first")
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            where = f"{title}: {name}" if name else title
            raise UserError(
                f"{where} is compiled by TorchScript, so what runs in it can't be observed or cast; "
                "open the model with the Python module that it was compiled from"
            )
    if not has_float64(device):
        wide = next((name for name, tensor in module.state_dict().items() if tensor.dtype == torch.float64), None)
        if wide is not None:
            raise UserError(f"{title}: {wide} is in float64, which {device} does not have; use --device cpu")


def _on_device(
    module: nn.Module, device: torch.device, places: Places | None, sources: Mapping[str, WeightSource]
) -> dict[int, torch.Tensor]:
    """Move a module to `device` or to `places`, with a placeholder for each weight in `sources`. Returns the data that the module's
    tensors had before, keyed by the `id` of the tensor object that is now in the module.
    """
    originals = {id(tensor): tensor.data for tensor in (*module.parameters(), *module.buffers())}
    if device.type != "cpu" or places is not None:
        for tensor in map(module.state_dict(keep_vars=True).__getitem__, sources):
            tensor.data = tensor.new_empty(0)  # moving a placeholder would take memory for the whole weight
        with enough_memory("the model", device):
            move = partial(module.to, device) if places is None else partial(distribute, module, places, device)
            _move(module, move, originals)
    for name, tensor in module.state_dict(keep_vars=True).items() if sources else ():
        if name in sources:
            tensor.data = sources[name].held(tensor.device)
    return originals


@dataclass
class _Steps:
    """Counts the steps of a cast. on_progress: called with the numbers of finished and of all steps, or None."""

    total: int
    on_progress: Callable[[int, int], None] | None
    done: int = 0

    def add(self) -> None:
        self.done += 1
        if self.on_progress is not None:
            self.on_progress(self.done, self.total)


@dataclass
class LiveModel:
    """A model in memory: its `nn.Module`, the tree of its modules and tensors, and its weights, which are cast in place."""

    module: nn.Module
    title: str
    device: torch.device
    tree: Tree
    weights: dict[str, Weight]
    """The weights, keyed by their name in the module. The key of a tied weight is the first of its names."""
    files: tuple[Path, ...] = ()
    """The files from which the weights may be memory-mapped."""
    folder: Path | None = None
    """The folder that holds the model's configuration and tokenizer."""
    checkpoint: Checkpoint | None = None
    """The headers of the files, or None for a module that the user's Python code made."""
    example_inputs: Callable[[], Any] | None = None
    """The function `example_inputs` in the user's Python file, or None."""
    notices: tuple[str, ...] = ()
    trust_remote_code: bool = False
    identities: tuple[FileIdentity, ...] = ()
    """The identities of `files` before anything was read, to detect later changes."""
    reference: str = ""
    """The model against which drift is measured. "": this model's stored weights in float32 arithmetic. "stored": this model in its
    stored dtypes. Any other text is the path or name of another checkpoint.
    """
    side_settings: tuple[SideSettings, ...] = ()
    """The settings of modules, such as the `eps` of a norm, in which another checkpoint as the reference differs from this model.
    """
    coverage: Coverage | None = None
    memory: MemoryBudget = field(default_factory=MemoryBudget)
    """Keeps the weights that a forward pass is using, if the model is larger than memory."""
    by_id: dict[int, Weight] = field(default_factory=dict)
    """The weights, keyed by the `id` of the tensor object in the module."""
    cache_formats: dict[str, str] = field(default_factory=dict)
    """The formats to which KV caches are rounded in a candidate run, keyed by the name of the cache tensor."""

    def __repr__(self) -> str:
        return f"LiveModel: {printable(self.title)} on {self.device}"

    @property
    def loader(self) -> Literal["transformers", "own"]:
        """The program that loads an export of this model: "transformers", or "own" for this program."""
        return "transformers" if self.checkpoint is not None and self.checkpoint.of_transformers else "own"

    @functools.cached_property
    def rounder(self) -> Rounder:
        """Chooses the codes of weights in dtypes with roundings."""
        return Rounder(self.weights, self.title, self.cache_budget, over_memory=self.memory.limited)

    @functools.cached_property
    def cache_names(self) -> Mapping[str, tuple[str, ...]]:
        """The names of KV cache tensors that rules may give a format, such as keys, keyed by the module that writes them. States of
        recurrent layers are left out.
        """
        found: dict[str, tuple[str, ...]] = {}
        for tensor in self.tree.kv_cache.of_tokens:
            found[tensor.module] = (*found.get(tensor.module, ()), tensor.name)
        return found

    @property
    def state_formats(self) -> dict[str, str]:
        """Those of `cache_formats` that states of recurrent layers have: they are rounded after each token."""
        return {name: form for name, form in self.cache_formats.items() if name.endswith(STATES)}

    @functools.cached_property
    def keys_read(self) -> Mapping[str, str]:
        """The names of the KV cache tensors with the keys that attention modules read, their own or another's, by module."""
        keys = (tensor for tensor in self.tree.kv_cache.tensors if tensor.part == "k")
        return {tensor.module: tensor.shared_with or tensor.name for tensor in keys}

    @classmethod
    def wrap(
        cls,
        module: nn.Module,
        title: str,
        device: torch.device,
        sources: Mapping[str, WeightSource] | None = None,
        placements: Mapping[str, Placement] | None = None,
        places: Places | None = None,
        **rest: Any,
    ) -> LiveModel:
        """Prepare a module for casting: set it to evaluation mode without gradients, move it to `device`, and keep its current
        tensors as the stored ones.

        sources: the source of each weight for which the module has a placeholder, keyed by any of the weight's names. placements:
        where each tensor of the checkpoint is loaded in the module. places: the devices of modules; None if all are on `device`.
        rest: values for other fields. Raises UserError if the module can't be run and observed, or does not fit on the device.
        """
        _refuse_unobservable(module, title, device)
        compiled = [name or "the model" for name, child in module.named_modules() if is_compiled(child)]
        if compiled:
            more = f" and {len(compiled) - 1} more" if len(compiled) > 1 else ""
            notice = f"compiled by torch.compile: {compiled[0]}{more}; what is compiled runs as it was written"
            rest["notices"] = (*rest.get("notices", ()), notice)
        trained = {name for name, each in module.named_parameters(remove_duplicate=False) if each.requires_grad}
        module.eval().requires_grad_(False)
        sources = sources or {}
        originals = _on_device(module, device, places, sources)
        infos, tensors = collect_tensors(module)
        sources = {info.name: sources[name] for info in infos for name in info.names if name in sources}
        for number, info in enumerate(infos):
            if info.name in sources and (source := sources[info.name]).format:
                nbytes = None if source.own else source.nbytes
                infos[number] = dataclasses.replace(
                    info, dtype=source.format, packed_bytes=nbytes, own_codes=source.own
                )
        listed, draft = infos, NO_DRAFT
        checkpoint = rest.get("checkpoint")
        if checkpoint is not None:
            assert placements is not None
            headers = checkpoint.tree().tensors
            infos = with_files(infos, checkpoint, placements, headers, own_dtypes=True)
            listed, draft = with_unused(infos, checkpoint, placements, headers, type(module).__name__)
        weights = {}
        for info in infos:
            tensor = tensors[info.name]
            original = originals.get(id(tensor), tensor.data)
            source = sources.get(info.name) or PlainSource(original)
            requires_grad = not trained.isdisjoint(info.names)
            weights[info.name] = Weight(
                info, tensor, source, info.dtype, decoded=not source.plain, requires_grad=requires_grad
            )
        tree = tree_of(module, listed, draft)
        rest["notices"] = (*rest.get("notices", ()), *draft_notice(tree))
        if checkpoint is not None:  # the module's own configuration may lack what quantized checkpoints declare
            tree.kv_cache = msgspec.structs.replace(tree.kv_cache, declared=declared_formats(checkpoint.config))
        by_id = {id(weight.tensor): weight for weight in weights.values()}
        return cls(module, title, device, tree, weights, by_id=by_id, **rest)

    @property
    def cache_budget(self) -> int:
        """Like `device.cache_budget`, but at most a quarter of the memory that a model larger than memory may take."""
        budget = cache_budget(self.device)
        return budget if not self.memory.limited else min(budget, self.memory.most * BLOCKS // 4)

    def apply(
        self,
        planned: Mapping[str, str],
        on_progress: Callable[[int, int], None] | None = None,
        cancelled: IsCancelled = never,
        caches: Mapping[str, str] | None = None,
        shares: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Cast every weight to its planned dtype. A weight that already has this dtype is cast again only if it now shares its
        scale with other weights than before.

        planned: the dtype of each weight, keyed by name. on_progress: called with the numbers of finished steps and of all, which
        are casts, and calibration runs for dtypes with roundings. caches: the formats of the KV caches, keyed by cache tensor; None
        leaves them unchanged. shares: the names of all weights over which a weight's tensor scale is computed, by its name, if
        some of them are not cast. Raises Cancelled between two weights; a later call continues from there. Raises UserError if the
        device lacks float64 or memory, and if a rounding can't be fitted.
        """
        if caches is not None:
            self.cache_formats = dict(caches)
        shared = scale_groups(
            {name: planned[name] for name, weight in self.weights.items() if not weight.info.own_codes}
        )
        shared |= {name: tuple(names) for name, names in (shares or {}).items()}
        pending = [
            weight
            for name, weight in self.weights.items()
            if weight.dtype != planned[name] or weight.shares != shared.get(name, ())
        ]
        wide = next((weight for weight in pending if planned[weight.info.name] == "float64"), None)
        if wide is not None and not has_float64(self.device):
            raise UserError(
                f"{wide.info.name} can't be cast to float64, which {self.device} does not have; use --device cpu"
            )
        # Weights that return to the mapped data come first, which frees memory before any is allocated.
        pending.sort(key=lambda weight: planned[weight.info.name] != weight.info.dtype)
        rounder = self.rounder
        unknown = rounder.unknown({weight.info.name: planned[weight.info.name] for weight in pending}, shared)
        step = _Steps(len(pending) + rounder.runs(unknown), on_progress).add
        try:
            names = [weight.info.name for weight in pending]
            for group, statistics in rounder.groups(names, unknown, shared, step, cancelled):
                for name in group:
                    if cancelled():
                        raise Cancelled
                    weight, dtype = self.weights[name], planned[name]
                    with enough_memory(f"{name} in {dtype}", weight.tensor.device):
                        sharing = [self.weights[other] for other in shared.get(name, ())]
                        weight.cast_to(dtype, sharing, rounder.rounded(name, dtype, sharing, statistics))
                    step()
        finally:
            if pending:
                trim_heap()

    @contextmanager
    def requiring_grad(self) -> Iterator[None]:
        """In the `with` block, set `requires_grad` of the weights that have it in plain torch, by which torch chooses some
        kernels. The block itself must not record gradients.
        """
        weights = [
            each.tensor for each in self.weights.values() if each.requires_grad and each.tensor.is_floating_point()
        ]
        try:
            for tensor in weights:
                tensor.requires_grad_()
            yield
        finally:
            for tensor in weights:
                tensor.requires_grad_(False)

    @property
    def resident_bytes(self) -> int:
        """The number of bytes of all current weights and buffers. Tied weights count once."""
        return sum(self.resident_by_device().values())

    def resident_by_device(self) -> dict[str, int]:
        """Return the number of bytes of the current weights and buffers on each device, keyed by the device's name."""
        sums = Counter[str]()
        for weight in self.weights.values():
            sums[str(weight.tensor.device)] += weight.nbytes
        return sums

    def lost_values(
        self,
        planned: Mapping[str, str] | None = None,
        cancelled: IsCancelled = never,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> tuple[ValueLoss, ...]:
        """Return, for each weight in which a cast does more than round, how many values become infinite or zero, or saturate.

        planned: the dtype of each weight, keyed by name; by default, the current dtypes. on_progress: called before each weight
        that has to be counted, with its index and the number of all weights. Raises Cancelled.
        """
        losses = []
        for number, (name, weight) in enumerate(self.weights.items()):
            dtype = weight.dtype if planned is None else planned[name]
            if dtype != weight.info.dtype and dtype not in weight.losses:
                on_progress(number, len(self.weights))
            losses.append(weight.count_loss(dtype, cancelled, cast=planned is None))
        return tuple(loss for loss in losses if loss is not None)

    def known_losses(self, planned: Mapping[str, str]) -> tuple[ValueLoss, ...] | None:
        """Return the result of `lost_values(planned)`, or None if a weight was never counted. Any thread may call this method."""
        changed = [
            (weight, planned[name]) for name, weight in self.weights.items() if planned[name] != weight.info.dtype
        ]
        if any(dtype not in weight.losses for weight, dtype in changed):
            return None
        return tuple(loss for weight, dtype in changed if (loss := weight.losses[dtype]) is not None)
