"""A live `nn.Module` whose tensors are cast in place and put back.

Every tensor keeps its identity (the `Parameter` object stays where the module has it); only the data behind
it changes. The data as stored, usually mapped from the checkpoint's file, is kept as long as the model lives, so a cast
always starts from the stored values and undoing one is putting them back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtype_engine.checkpoint import Checkpoint, FileIdentity
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.core.fused import scale_groups, whole_scale_group
from dtype_engine.core.heap import trim_heap
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.results.losses import ValueLoss
from dtype_engine.runtime.formats.row_blocks import finite_amax
from dtype_engine.runtime.model.module_tree import collect_tensors, tree_of
from dtype_engine.runtime.model.name_mapping import Placement
from dtype_engine.runtime.model.stored_tree import unused, with_files
from dtype_engine.runtime.model.torch_private import is_compiled
from dtype_engine.runtime.numerics.overflow_underflow import count_losses
from dtype_engine.runtime.numerics.quantize import cast_or_quantize


@dataclass(slots=True)
class Weight:
    """One distinct tensor of the module.

    `tensor` is the object in the module; `original` the data as stored (never written to); `dtype` the name of the
    dtype it is in now, and `scale` what a storage-only one carries.
    """

    info: TensorInfo
    tensor: torch.Tensor
    original: torch.Tensor
    dtype: str
    scale: torch.Tensor | None = None
    losses: dict[str, ValueLoss | None] = field(default_factory=dict)
    """What a cast of the original loses, by dtype, as far as it was counted."""
    stashed: torch.Tensor | None = None
    """The cast data, while a reference pass runs with the original in the module."""
    stored_scale: torch.Tensor | None = None
    """The scales that a weight stored in a storage-only dtype came with; such a weight is never cast."""
    shares: tuple[str, ...] = ()
    """The weights whose tensor scale it shares now, its own name among them (NVFP4's fused siblings)."""
    _amax: float | None = None

    @property
    def changed(self) -> bool:
        """Whether it is in another dtype than stored."""
        return self.dtype != self.info.dtype

    @property
    def form(self) -> str:
        """What its values follow from beside what is stored: the dtype, and with whom it shares a scale."""
        return " ".join((self.dtype, *self.shares))

    @property
    def amax(self) -> float:
        """The largest finite |value| as stored."""
        if self._amax is None:
            self._amax = finite_amax(self.original)
        return self._amax

    def cast_to(self, dtype: str, sharing: Sequence[Weight] = ()) -> None:
        """Cast it to `dtype`, from the stored values. sharing: the weights that share its tensor scale, itself among them."""
        amax = max((weight.amax for weight in sharing), default=None)
        shares = tuple(weight.info.name for weight in sharing)
        if shares != self.shares:
            self.losses.pop(dtype, None)
        self.shares = shares
        if dtype == self.info.dtype:
            self.tensor.data = self.original.to(self.tensor.device)
            self.scale = self.stored_scale
        else:
            data, scale = cast_or_quantize(self.original.to(self.tensor.device), dtype, amax)
            self.tensor.data, self.scale = data, scale
        self.dtype = dtype

    def count_loss(self, dtype: str, cancelled: IsCancelled, cast: bool = False) -> ValueLoss | None:
        """What a cast of the stored values to `dtype` loses; counted at most once. `cast`: it is in this dtype now, and stays so
        while it is counted. Raises Cancelled.
        """
        if dtype == self.info.dtype:
            return None
        if dtype not in self.losses:
            held = self.tensor.data if self.stashed is None else self.stashed
            self.losses[dtype] = count_losses(self.info.name, self.original, dtype, held if cast else None, cancelled)
        return self.losses[dtype]

    @property
    def nbytes(self) -> int:
        """Bytes it takes now, the scales included."""
        held = self.tensor if self.stashed is None else self.stashed
        return held.nbytes + (self.scale.nbytes if self.scale is not None else 0)


def sharing(weights: Mapping[str, Weight], name: str, dtype: str) -> list[Weight]:
    """The weights that one shares a scale with when all that it is fused with is in `dtype`, itself among them; else none."""
    group = [weights[member] for member in whole_scale_group(name, dtype, weights)]
    castable = [weight for weight in group if not weight.info.quantized]
    return castable if len(castable) > 1 else []


@dataclass
class LiveModel:
    """A module, its tree, and its weights by canonical name; `files` are mapped, `folder` has config and tokenizer.

    `checkpoint`: the headers of what it was loaded from, None for a module of the user's own. `identities`: the `files` as they
    were before anything of them was read. `trust_remote_code`: whether Python code in the folder may run.
    """

    module: nn.Module
    title: str
    device: torch.device
    tree: Tree
    weights: dict[str, Weight]
    files: tuple[Path, ...] = ()
    folder: Path | None = None
    checkpoint: Checkpoint | None = None
    example_inputs: Callable[[], Any] | None = None
    notices: tuple[str, ...] = ()
    trust_remote_code: bool = False
    identities: tuple[FileIdentity, ...] = ()
    by_id: dict[int, Weight] = field(default_factory=dict)

    @classmethod
    def wrap(
        cls,
        module: nn.Module,
        title: str,
        device: torch.device,
        quantized: Mapping[str, tuple[str, torch.Tensor]] | None = None,
        placements: Mapping[str, Placement] | None = None,
        **rest: Any,
    ) -> LiveModel:
        """Take over a module: evaluation mode, no gradients, on `device`, its tensors as they are now the originals.

        `quantized`: the storage-only dtype and the scales of weights that hold scaled numbers, by a name of each. `placements`:
        where each tensor of the files went, for a module with a checkpoint. Raises UserError
        where tensors have no data, or a module is compiled by TorchScript.
        """
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            raise UserError(f"{title}: some tensors have no data (they are on the meta device); load the weights first")
        for name, child in module.named_modules():
            if isinstance(child, torch.jit.ScriptModule):
                where = f"{title}: {name}" if name else title
                raise UserError(
                    f"{where} is compiled by TorchScript, so what runs in it is not seen and can't be cast; "
                    "open the model with the Python module that it was compiled from"
                )
        compiled = [name or "the model" for name, child in module.named_modules() if is_compiled(child)]
        if compiled:
            more = f" and {len(compiled) - 1} more" if len(compiled) > 1 else ""
            notice = f"compiled by torch.compile: {compiled[0]}{more}; what is compiled runs as it was written"
            rest["notices"] = (*rest.get("notices", ()), notice)
        module.eval().requires_grad_(False)
        originals = {id(tensor): tensor.data for tensor in (*module.parameters(), *module.buffers())}
        if device.type != "cpu":
            try:
                module.to(device)  # where a tensor object can't follow, a new one takes its place
            except torch.OutOfMemoryError as error:
                reason = str(error).split(". ")[0]
                raise UserError(f"the model does not fit on {device}: {reason}; try --device cpu") from None
        infos, tensors = collect_tensors(module)
        quantized = quantized or {}
        quantized = {info.name: quantized[name] for info in infos for name in info.names if name in quantized}
        infos = [
            dataclasses.replace(info, dtype=quantized[info.name][0], quantized=True) if info.name in quantized else info
            for info in infos
        ]
        besides: list[TensorInfo] = []
        checkpoint = rest.get("checkpoint")
        if checkpoint is not None:
            assert placements is not None
            headers = checkpoint.tree().tensors
            infos = with_files(infos, checkpoint, placements, headers, own_dtypes=True)
            besides = unused(placements, headers, infos, type(module).__name__)
        weights = {
            info.name: Weight(
                info, tensors[info.name], originals.get(id(tensors[info.name]), tensors[info.name].data), info.dtype
            )
            for info in infos
        }
        for name, (_, scale) in quantized.items():
            weights[name].scale = weights[name].stored_scale = scale.to(device)
        tree = tree_of(module, [*infos, *besides])
        return cls(
            module,
            title,
            device,
            tree,
            weights,
            by_id={id(weight.tensor): weight for weight in weights.values()},
            **rest,
        )

    def apply(
        self,
        planned: Mapping[str, str],
        on_progress: Callable[[int, int], None] | None = None,
        cancelled: IsCancelled = never,
    ) -> None:
        """Bring every tensor into its planned dtype; those that already are stay untouched, but for fused siblings that share a
        scale with others than before.

        Needs memory for the new tensors only: each replaces the one before it at once. Raises Cancelled between
        two tensors; calling again with any plan goes on from there.
        """
        shared = scale_groups(
            {name: planned[name] for name, weight in self.weights.items() if not weight.info.quantized}
        )
        pending = [
            weight
            for name, weight in self.weights.items()
            if weight.dtype != planned[name] or weight.shares != shared.get(name, ())
        ]
        # Those that go back to the mapped data come first: that frees memory before any is needed.
        pending.sort(key=lambda weight: planned[weight.info.name] != weight.info.dtype)
        try:
            for done, weight in enumerate(pending):
                if cancelled():
                    raise Cancelled
                name = weight.info.name
                weight.cast_to(planned[name], [self.weights[other] for other in shared.get(name, ())])
                if on_progress is not None:
                    on_progress(done + 1, len(pending))
        finally:
            if pending:
                trim_heap()

    @property
    def resident_bytes(self) -> int:
        """Bytes of all the module's tensors now, tied ones once, non-persistent buffers included."""
        return sum(self.resident_by_device().values())

    def resident_by_device(self) -> dict[str, int]:
        """The same by device."""
        sums: dict[str, int] = {}
        for weight in self.weights.values():
            device = str(weight.tensor.device)
            sums[device] = sums.get(device, 0) + weight.nbytes
        for tensor in self._unpacked():
            sums[str(tensor.device)] = sums.get(str(tensor.device), 0) + tensor.nbytes
        return sums

    def _unpacked(self) -> list[torch.Tensor]:
        """Weights that another program's code has unpacked from quantised ones since, as compressed-tensors does in the first
        forward pass."""
        if all(weight.info.uncastable_reason is None for weight in self.weights.values()):
            return []
        held = {id(tensor): tensor for tensor in (*self.module.parameters(), *self.module.buffers())}
        return [tensor for key, tensor in held.items() if key not in self.by_id]

    def lost_values(
        self, planned: Mapping[str, str] | None = None, cancelled: IsCancelled = never
    ) -> tuple[ValueLoss, ...]:
        """The weights whose cast loses values, besides rounding them: under the casts in force, or under a plan, for which only
        the stored values are read. Counts each tensor in each dtype once. Raises Cancelled.
        """
        losses = [
            weight.count_loss(weight.dtype if planned is None else planned[name], cancelled, cast=planned is None)
            for name, weight in self.weights.items()
        ]
        return tuple(loss for loss in losses if loss is not None)

    def known_losses(self, planned: Mapping[str, str]) -> tuple[ValueLoss, ...] | None:
        """The same under a plan where all of it was counted before, else None. Any thread may ask."""
        changed = [
            (weight, planned[name]) for name, weight in self.weights.items() if planned[name] != weight.info.dtype
        ]
        if any(dtype not in weight.losses for weight, dtype in changed):
            return None
        return tuple(loss for weight, dtype in changed if (loss := weight.losses[dtype]) is not None)
