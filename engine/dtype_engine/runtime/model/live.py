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
from typing import Any, Literal, Protocol

import msgspec
import torch
from torch import nn

from dtype_engine.checkpoint import Checkpoint, FileIdentity
from dtype_engine.checkpoint.kv_cache import declared_formats
from dtype_engine.core import dtypes
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.core.fused import scale_groups, whole_scale_group
from dtype_engine.core.system_memory import trim_heap
from dtype_engine.core.text import printable
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.results.coverage import Coverage
from dtype_engine.results.losses import ValueLoss, total
from dtype_engine.runtime.device import cache_budget, enough_memory, has_float64
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.formats.row_blocks import finite_amax, stopping
from dtype_engine.runtime.libraries.torch_private import is_compiled, slots_of
from dtype_engine.runtime.model.device_map import Places, distribute
from dtype_engine.runtime.model.module_tree import collect_tensors, tree_of
from dtype_engine.runtime.model.name_mapping import Placement
from dtype_engine.runtime.model.rounded_weights import RoundedWeights
from dtype_engine.runtime.model.side_settings import SideSettings
from dtype_engine.runtime.model.stored_tree import unused, with_files
from dtype_engine.runtime.numerics.activations import InputFormat
from dtype_engine.runtime.numerics.overflow_underflow import all_losses, count_losses
from dtype_engine.runtime.numerics.quantize import cast_or_quantize
from dtype_engine.runtime.numerics.roundings import RoundedCodes, WeightStatistics, rounded_codes
from dtype_engine.runtime.weights.blockwise import BlockwiseSource
from dtype_engine.runtime.weights.budget import BLOCKS, MemoryBudget
from dtype_engine.runtime.weights.source import PlainSource, WeightSource, placeholder


@dataclass(slots=True)
class Weight:
    """One distinct tensor of the module. A tied weight, which has several names in the module, is a single `Weight`."""

    info: TensorInfo
    tensor: torch.Tensor
    """The tensor object in the module. It has placeholder data if `blockwise` is True."""
    stored: WeightSource
    """The values from which every cast starts."""
    dtype: str
    """The current dtype, such as "bfloat16" or "nvfp4"."""
    scale: torch.Tensor | None = None
    """The scales of the codes that the module holds, or None if it holds no codes. A placeholder if `blockwise` is True."""
    rounded: RoundedCodes | None = None
    """The current codes and scales, if a rounding such as GPTQ chose them. None if the dtype has no rounding, and if no product
    used the weight in the calibration runs, so that it has the nearest codes.
    """
    decoded: bool = False
    """Whether each operation has to read or decode the stored values, because the module holds a placeholder for them."""
    losses: dict[str, ValueLoss | None] = field(default_factory=dict)
    """Caches, for each dtype, the counts of values that the cast makes infinite or zero, or saturates; None if it only rounds."""
    stashed: torch.Tensor | None = None
    """The cast data, while a reference run has the original data in the module."""
    other_reference: WeightSource | None = None
    """The weight's values in the reference model, if this is another checkpoint."""
    as_stored: bool = False
    """Whether the reference run computes with this weight in its stored dtype, as plain torch does, instead of in float32."""
    shares: tuple[str, ...] = ()
    """The names of the weights that currently have a common tensor scale, including this one, such as q, k and v in NVFP4."""
    part_losses: dict[tuple[str, int], ValueLoss] = field(default_factory=dict)
    """Caches losses of a weight that is cast in parts (`in_parts`), keyed by the dtype and the index of the part."""
    requires_grad: bool = False
    """Whether the model's code made it a parameter that requires gradients. torch chooses some kernels by that, without gradients
    too: `linear` in float16 rounds otherwise for an input that is not contiguous.
    """
    _sharing: tuple[Weight, ...] = ()
    _amax: float | None = None

    @property
    def reference(self) -> WeightSource:
        """The values that the reference model has."""
        return self.stored if self.other_reference is None else self.other_reference

    @property
    def cast(self) -> bool:
        """Whether the current dtype differs from the stored one."""
        return self.dtype != self.info.dtype

    @property
    def differs(self) -> bool:
        """Whether a reference run needs other data for this weight than the module has."""
        return self.cast or self.other_reference is not None

    @property
    def has_scales(self) -> bool:
        """Whether the weight is in a format of this program with scales, such as float8, either cast or as stored."""
        return self.scale is not None or (self.decoded and self.stored.own)

    @property
    def blockwise(self) -> bool:
        """Whether the model is larger than memory, so that each pass reads, and casts, the values when it reaches the weight."""
        return isinstance(self.stored, BlockwiseSource)

    def current(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (the current data, its scales or None for a dtype without scales). Either the weight must be cast, or the module
        must hold its values.
        """
        if not isinstance(self.stored, BlockwiseSource):
            return self.tensor.data, self.scale
        key = id(self), self.dtype, self.tensor.device
        return self.stored.memory.once(key, self._cast_values, self.stored.inner)

    def _cast_values(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        amax = max((weight.amax for weight in self._sharing), default=None)
        stored = self.stored.read(self.tensor.device)
        made = cast_or_quantize(stored, self.dtype, amax)
        if self.dtype not in self.losses:  # later, the values would have to be read again
            self.losses[self.dtype] = count_losses(self.info.name, stored, self.dtype, made[0], never)
        return made

    def in_parts(self, dtype: str) -> bool:
        """Return whether a weight of a model larger than memory can be cast for one index of its first dimension alone, such as one
        expert, because no block of the format has values of two indexes.
        """
        if not isinstance(self.stored, BlockwiseSource) or not self.stored.has_parts:
            return False
        blocks = dtypes.BY_NAME[dtype].blocks
        return blocks is None or blocks.rows == 1 or self.stored.shape[-1] >= blocks.columns

    def current_part(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (the current data, its scales or None) at one index of the first dimension: [1, ...]. `in_parts` must be True for
        the weight's dtype.
        """
        assert isinstance(self.stored, BlockwiseSource)
        key = id(self), self.dtype, self.tensor.device, index
        return self.stored.memory.once(key, lambda: self._cast_part(index, self.dtype), self.stored.inner)

    def _cast_part(self, index: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        stored = self._part(index)
        made = cast_or_quantize(stored, dtype, self._scale_amax(dtype))
        if (dtype, index) not in self.part_losses:
            self.part_losses[dtype, index] = all_losses(self.info.name, stored, dtype, made[0])
        return made

    def _part(self, index: int) -> torch.Tensor:
        part = self.stored.part(index, self.tensor.device)
        assert part is not None
        return part[None]

    def _scale_amax(self, dtype: str) -> float | None:
        """Return the largest |value| of the weights that share a tensor scale in `dtype`, or None if it has no tensor scale."""
        row = dtypes.BY_NAME[dtype]
        if not row.per_tensor and (row.blocks is None or not row.blocks.tensor_scale):
            return None
        return max(weight.amax for weight in (self._sharing if dtype == self.dtype and self._sharing else (self,)))

    @property
    def input_format(self) -> InputFormat | None:
        """How runtimes round the activations that this weight multiplies, or None if they do not. They round to the weight's
        format. If another program quantized the weight and no rule casts it, they round as the files declare.
        """
        return InputFormat(self.dtype) if self.scale is not None else self.stored.input_format if self.decoded else None

    @property
    def form(self) -> str:
        """A text that identifies this weight's current values: the dtype, and the names of the weights that share its scale."""
        return " ".join((self.dtype, *self.shares))

    @property
    def amax(self) -> float:
        """The largest finite |value| of the stored data."""
        if self._amax is None:
            if isinstance(self.stored, BlockwiseSource) and self.stored.has_parts:
                self._amax = max(finite_amax(self._part(index)) for index in range(self.stored.shape[0]))
            else:
                self._amax = finite_amax(self.stored.read())
        return self._amax

    def _losses_of_parts(self, dtype: str, cancelled: IsCancelled) -> ValueLoss | None:
        for index in range(self.stored.shape[0]):
            if cancelled():
                raise Cancelled
            if (dtype, index) not in self.part_losses:  # such as an expert to which no token was sent
                self._cast_part(index, dtype)
        self.stored.release()
        loss = total([self.part_losses[dtype, index] for index in range(self.stored.shape[0])])
        return loss if loss.is_listed else None

    def cast_to(self, dtype: str, sharing: Sequence[Weight] = (), rounded: RoundedCodes | None = None) -> None:
        """Cast the stored values to `dtype`. sharing: the weights that get a common tensor scale, including this one. rounded: the
        codes that a rounding chose, or None for the nearest ones.
        """
        shares = tuple(weight.info.name for weight in sharing)
        if shares != self.shares:
            self.losses.pop(dtype, None)
            self.part_losses = {key: loss for key, loss in self.part_losses.items() if key[0] != dtype}
        self.shares, self._sharing, self.rounded = shares, tuple(sharing), rounded
        if rounded is not None:
            self.tensor.data, self.scale = rounded.codes, rounded.scale
        elif self.blockwise and dtype != self.info.dtype:
            held = torch_dtype(dtype) if dtype in dtypes.COMPUTE_DTYPES else self.stored.holds
            self.tensor.data = placeholder(self.stored.shape, held, self.tensor.device)
            self.scale = None if dtype in dtypes.COMPUTE_DTYPES else torch.ones(1)
        elif dtype == self.info.dtype:
            self.tensor.data, self.scale = self.stored.held(self.tensor.device), None
        else:
            amax = max((weight.amax for weight in sharing), default=None)
            self.tensor.data, self.scale = cast_or_quantize(self.stored.read(self.tensor.device), dtype, amax)
        self.dtype, self.decoded = dtype, dtype == self.info.dtype and not self.stored.plain

    def count_loss(self, dtype: str, cancelled: IsCancelled, cast: bool = False) -> ValueLoss | None:
        """Return the counts of values that a cast to `dtype` makes infinite or zero, or saturates. Returns None if it only rounds,
        and for the stored dtype. The counts are kept in `losses`. Raises Cancelled.

        cast: True if the weight currently has this dtype. The current data, which must not change during the call, is then
        examined instead of casting again.
        """
        if dtype == self.info.dtype:
            return None
        if dtype not in self.losses:
            if self.in_parts(dtype):
                self.losses[dtype] = self._losses_of_parts(dtype, cancelled)
                return self.losses[dtype]
            held = None
            if cast:  # reading the values of a blockwise weight may already count their losses
                held = self.current()[0] if self.blockwise or self.stashed is None else self.stashed
            if dtype not in self.losses:
                with stopping(cancelled):
                    self.losses[dtype] = count_losses(self.info.name, self.stored.read(), dtype, held, cancelled)
        return self.losses[dtype]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the current data and scales."""
        if self.decoded or self.blockwise:
            return self.stored.nbytes
        held = self.tensor if self.stashed is None else self.stashed
        if held.layout is not torch.strided:
            return self.info.nbytes
        return held.nbytes + (self.scale.nbytes if self.scale is not None else 0)


def sharing(weights: Mapping[str, Weight], name: str, dtype: str) -> list[Weight]:
    """Return the weights that would share one scale with the weight `name` if all were in `dtype`, including the weight itself, or
    [] if no other would share it. weights: all weights of the model, keyed by name.
    """
    group = [weights[member] for member in whole_scale_group(name, dtype, weights)]
    castable = [weight for weight in group if not weight.info.own_codes]
    return castable if len(castable) > 1 else []


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


class InputsOfWeights(Protocol):
    """Runs a model on its calibration inputs, and collects statistics of what its weights are multiplied with."""

    def runs(self, rounded: Mapping[str, str]) -> int:
        """Return how many runs over one sequence `collect` makes."""

    def collect(
        self, rounded: Mapping[str, str], on_run: Callable[[], None], cancelled: IsCancelled
    ) -> Iterator[dict[str, WeightStatistics]]:
        """Yield the statistics of as many weights at a time as fit in memory, by name. rounded: the weights' new dtypes by name."""


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
    calibration: InputsOfWeights | None = None
    """Runs the model on its calibration inputs when weights are cast to dtypes with roundings. None if it has no inputs."""
    rounded: RoundedWeights = field(default_factory=RoundedWeights)
    """Keeps what roundings chose for weights that were cast otherwise since."""

    def __repr__(self) -> str:
        return f"LiveModel: {printable(self.title)} on {self.device}"

    @property
    def loader(self) -> Literal["transformers", "own"]:
        """The program that loads an export of this model: "transformers", or "own" for this program."""
        return "transformers" if self.checkpoint is not None and self.checkpoint.of_transformers else "own"

    @functools.cached_property
    def cache_names(self) -> Mapping[str, tuple[str, ...]]:
        """The names of KV cache tensors that rules may give a format, such as keys, keyed by the module that writes them."""
        found: dict[str, tuple[str, ...]] = {}
        for name in self.tree.caches:
            module = name.rsplit(".", 2)[0]
            found[module] = (*found.get(module, ()), name)
        return found

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
        unused_infos = list[TensorInfo]()
        checkpoint = rest.get("checkpoint")
        if checkpoint is not None:
            assert placements is not None
            headers = checkpoint.tree().tensors
            infos = with_files(infos, checkpoint, placements, headers, own_dtypes=True)
            unused_infos = unused(placements, headers, infos, type(module).__name__)
        weights = {}
        for info in infos:
            tensor = tensors[info.name]
            original = originals.get(id(tensor), tensor.data)
            source = sources.get(info.name) or PlainSource(original)
            requires_grad = not trained.isdisjoint(info.names)
            weights[info.name] = Weight(
                info, tensor, source, info.dtype, decoded=not source.plain, requires_grad=requires_grad
            )
        tree = tree_of(module, [*infos, *unused_infos])
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
        unknown = self._to_round(pending, planned, shared)
        runs = 0 if self.calibration is None else self.calibration.runs(unknown)
        step = _Steps(len(pending) + runs, on_progress).add
        try:
            for group, statistics in self._groups(pending, unknown, step, cancelled):
                for weight in group:
                    if cancelled():
                        raise Cancelled
                    name, others = weight.info.name, shared.get(weight.info.name, ())
                    with enough_memory(f"{name} in {planned[name]}", weight.tensor.device):
                        sharing = [self.weights[other] for other in others]
                        weight.cast_to(
                            planned[name], sharing, self._rounded(weight, planned[name], sharing, statistics)
                        )
                    step()
        finally:
            if pending:
                trim_heap()

    def _to_round(
        self, pending: Sequence[Weight], planned: Mapping[str, str], shared: Mapping[str, tuple[str, ...]]
    ) -> dict[str, str]:
        """Return the new dtypes, by name, of the weights that are to be rounded by statistics that are not known. Raises what
        `need_calibration` raises.
        """
        found = {}
        for weight in pending:
            name, dtype = weight.info.name, planned[weight.info.name]
            if not dtypes.has_rounding(dtype) or self.rounded.get(name, dtype, shared.get(name, ())) is not None:
                continue
            found[name] = dtype
        self.need_calibration(found)
        return found

    def round_ahead(
        self, rounded: Mapping[str, str], shares: Mapping[str, Sequence[str]], cancelled: IsCancelled
    ) -> set[str]:
        """Round weights that `apply` is to cast one after another, so that it need not run the calibration inputs for each. Returns
        the names of the weights that a matrix product uses; all others have the nearest values. rounded: their new dtypes by name.
        shares: as for `apply`. Raises NoForward, KernelError, Cancelled, and what `need_calibration` raises.
        """
        calibration, found = self.need_calibration(rounded), set[str]()
        for statistics in calibration.collect(rounded, ignore, cancelled) if calibration is not None else ():
            for name in statistics:
                if cancelled():
                    raise Cancelled
                sharing = [self.weights[each] for each in shares.get(name, ())]
                self._rounded(self.weights[name], rounded[name], sharing, statistics)
                found.add(name)
        return found

    def need_calibration(self, rounded: Mapping[str, str]) -> InputsOfWeights | None:
        """Return what collects the statistics for new dtypes with roundings (`rounded`, by weight name), or None if there are none.
        Raises UserError if the model has no calibration inputs, or one of the weights is not in memory.
        """
        for name, dtype in rounded.items():
            if self.weights[name].blockwise:
                raise UserError(
                    f"{name} can't be rounded to {dtype} in a model that is run from the disk: use {dtypes.unrounded(dtype)}"
                )
            if self.calibration is None:
                raise UserError(
                    f"{name} can't be rounded to {dtype} without inputs: {self.title} has none that it can be run on"
                )
        return self.calibration if rounded else None

    def _groups(
        self, pending: Sequence[Weight], unknown: Mapping[str, str], step: Callable[[], None], cancelled: IsCancelled
    ) -> Iterator[tuple[list[Weight], Mapping[str, WeightStatistics]]]:
        """Yield the weights to cast with the statistics of their inputs: first those for which none are needed (which are not in
        `unknown`), last those that no product used. step: called after each calibration run of one sequence.
        """
        yield [each for each in pending if each.info.name not in unknown], {}
        rest = dict(unknown)
        for statistics in self.calibration.collect(unknown, step, cancelled) if unknown and self.calibration else ():
            yield [self.weights[each] for each in statistics], statistics
            for each in statistics:
                rest.pop(each, None)
        yield [self.weights[each] for each in rest], {}

    def _rounded(
        self, weight: Weight, dtype: str, sharing: Sequence[Weight], statistics: Mapping[str, WeightStatistics]
    ) -> RoundedCodes | None:
        """Return what a rounding chooses for a weight in `dtype`, or None without a rounding or statistics."""
        name, shares = weight.info.name, tuple(each.info.name for each in sharing)
        kept = self.rounded.get(name, dtype, shares)
        if kept is None and name in statistics:
            amax = max((each.amax for each in sharing), default=None)
            kept = rounded_codes(weight.stored.read(weight.tensor.device), dtype, statistics[name], amax)
            self.rounded.keep(name, dtype, shares, kept, self.cache_budget)
        return kept

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
