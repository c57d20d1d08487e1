"""The names of a PEFT adapter's tensors, and which weights of its base they mean."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property

import msgspec

from dtype_engine.checkpoint.checkpoint import Checkpoint
from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import ends_of
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable

PREFIX = "base_model.model."
_BASE_LAYER = ".base_layer"
"""PEFT puts it into a name for each adapter around a module."""
_LORA = re.compile(
    r"(?P<module>.+)\.lora_(?:(?P<embedding>embedding_)?(?P<side>[AB])(?:\.weight)?|B\.(?P<bias>bias)|(?P<magnitude>magnitude_vector)(?:\.weight)?)"
)


class LoraNames(msgspec.Struct):
    """The LoRA tensors of one module, or of one parameter of it."""

    module: str
    """The module's name in the model, without PEFT's additions."""
    embedding: bool = False
    sides: dict[str, CheckpointTensor] = msgspec.field(default_factory=dict)
    """The matrices, by "A" and "B"."""
    bias: CheckpointTensor | None = None
    magnitude: CheckpointTensor | None = None

    def pair(self) -> tuple[CheckpointTensor, CheckpointTensor]:
        """Return (A, B). Raises UserError if one is missing, or if they are no matrices of one kind."""
        if len(self.sides) < 2:
            raise UserError(
                f"{printable(self.module)} has no lora_{'B' if 'A' in self.sides else 'A'} beside the other"
            )
        down, up = self.sides["A"], self.sides["B"]
        if min(len(down.shape), len(up.shape)) < 2 or not all((*down.shape, *up.shape)):
            raise UserError(f"the matrices of {printable(self.module)} are {list(down.shape)} and {list(up.shape)}")
        return down, up


def lora_names(adapter: Checkpoint) -> tuple[list[LoraNames], dict[str, CheckpointTensor]]:
    """Return (the LoRA tensors of an adapter, its other tensors by the names that they have in the model)."""
    loras: dict[tuple[str, bool], LoraNames] = {}
    others: dict[str, CheckpointTensor] = {}
    for stored, tensor in adapter.tensors.items():
        name = stored.removeprefix(PREFIX)
        if (match := _LORA.fullmatch(name)) is None:
            others[name.replace(_BASE_LAYER, "")] = tensor
            continue
        embedding = match["embedding"] is not None
        each = loras.setdefault(
            (match["module"], embedding), LoraNames(match["module"].replace(_BASE_LAYER, ""), embedding)
        )
        if match["bias"]:
            each.bias = tensor
        elif match["magnitude"]:
            each.magnitude = tensor
        else:
            each.sides[match["side"]] = tensor
    return list(loras.values()), others


class BaseNames:
    """Finds the weights of a base model by the names that an adapter gives them: those in the model as it was loaded, which may
    differ from those in the files in their first parts.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    @cached_property
    def _by_end(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self._names:
            for end in ends_of(name):
                if "." in end:
                    found.setdefault(end, []).append(name)
        return found

    def find(self, name: str) -> str | None:
        """Return the name of a weight in the files, or None if there is none, or if several fit as well."""
        for spelling in (name, name.replace(".mlp.", ".block_sparse_moe.")):  # Mixtral's name in its files
            same = (spelling, spelling.removeprefix("model."), f"model.{spelling}")
            if (found := next((each for each in same if each in self._names), None)) is not None:
                return found
            for end in list(ends_of(spelling))[1:]:
                left_out = set(spelling.removesuffix(end).split("."))
                if any(part.isdecimal() for part in left_out):
                    break  # without the number of its layer, a name may be that of any layer
                if not (fitting := self._by_end.get(end)):
                    continue
                shared = {each: len(left_out & set(each.removesuffix(end).split("."))) for each in fitting}
                best = [each for each in fitting if shared[each] == max(shared.values())]
                return best[0] if len(best) == 1 else None
        return None
