"""Describes the tensors in which a program stores a weight that it quantized: their names, and what must hold for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor

FLOAT8 = frozenset({"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"})
BYTES = frozenset({"int8", "uint8"})
WORDS = frozenset({"int32", "uint32"})
CODES_DTYPES = FLOAT8 | BYTES | WORDS | {"int16", "uint16", "float4_e2m1fn_x2"}
"""The dtypes that codes have, except for those that are stored as if they were ordinary numbers."""
Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
Tensors = Mapping[str, CheckpointTensor]
Config = Mapping[str, Any]
"""The content of config.json, or the quantization settings in it."""


class Layout(msgspec.Struct, frozen=True, eq=False):
    """The names that a program gives to the tensors of a weight, and what must hold for these tensors. A name is a stem, which they
    share, and a suffix: `x.q_proj.qweight` is `x.q_proj.` and `qweight`. Unless a field says otherwise, it holds suffixes.
    """

    what: str
    """Words for the user that complete "a weight that is ...", such as "packed by compressed-tensors"."""
    codes: str
    scale: str
    """The tensor of scales, without which the codes can't be read."""
    dtypes: frozenset[str]
    """The dtypes that codes may have. A tensor with the name of codes but another dtype is a plain weight."""
    more: tuple[str, ...] = ()
    """Optional tensors other than codes and scales, such as zero points."""
    beside: tuple[str, ...] = ()
    """Optional tensors that are named after the weight's module, such as `x.input_scale` for `x.weight`, and not after its stem."""
    mark: str = ""
    """A tensor of the module that every weight of this layout has, unlike those of another with the same codes and scales."""
    alone: tuple[str, ...] = ()
    """Ends of names that only tensors of a quantized weight have, even if others of its tensors are missing."""
    orphans: tuple[str, ...] = ()
    """Ends of the names of scales and zero points by which `check` recognizes them if their codes are missing."""
    proofs: tuple[str, ...] = ()
    """Tensors that only codes have. They are needed if codes have the name that the weight had before."""
    several: bool = False
    """Whether an element of int8 or float8 may hold several codes."""
    fused_scale: str = ""
    """A scale of the whole tensor, which layers that runtimes fuse into one should have in common."""
    more_scales: tuple[str, ...] = ()
    """Further tensors of scales."""
    exponents: bool = False
    """Whether scales stored as bytes are exponents of two."""
    signed: bool = False
    """Whether scales may be negative."""
    padded: Callable[[CheckpointTensor, CheckpointTensor], bool] = lambda codes, scale: False
    """Takes codes and scales. Returns whether some scales may be 0, because they belong to no codes."""
    required: Callable[[CheckpointTensor, CheckpointTensor], tuple[str, ...]] = lambda codes, scale: ()
    """Takes codes and scales. Returns the other tensors that the weight can't be without."""
    scale_shapes: Callable[[PackedWeight, Tensors, Config], Shapes] = lambda weight, tensors, config: ()
    """Takes a weight, all tensors, and config.json. Returns all shapes that the scales may have, or () if unknown."""
    part_shapes: Callable[[Shape], Mapping[str, Shape]] = lambda scale: {}
    """Takes the shape of the scales. Returns the shapes of other tensors of the weight, by suffix."""

    def holds_codes(self, name: str, dtype: str, tensors: Mapping[str, object]) -> bool:
        """Return whether a tensor holds codes of this layout by its name and dtype or by the other tensors of its weight."""
        if dtype not in self.dtypes:
            return False
        if self.codes in ("", "weight"):
            return any(name.removesuffix(self.codes) + suffix in tensors for suffix in self.proofs)
        return name.endswith(self.codes) and dtype in CODES_DTYPES

    def codes_of(self, name: str) -> str:
        """Return the name of the codes to which another tensor of a weight belongs."""
        suffix = next(suffix for suffix in (self.scale, *self.more) if name.endswith(suffix))
        return name.removesuffix(suffix) + self.codes


class PackedWeight(msgspec.Struct, frozen=True):
    """A weight that another program quantized, with the names of its tensors (codes, scales, ...) in the file."""

    layout: Layout
    stem: str

    @property
    def name(self) -> str:
        """The weight's name before quantization, such as `x.weight` for `x.weight_packed` or `x.qweight`."""
        return f"{self.stem}weight" if self.stem.endswith(".") else self.stem

    @property
    def codes(self) -> str:
        return self.stem + self.layout.codes

    @property
    def scale(self) -> str:
        return self.stem + self.layout.scale

    @property
    def module(self) -> str:
        """The name of the weight's module with a dot at its end, or "" if it has none."""
        return self.stem[: self.stem.rfind(".") + 1]

    def part(self, suffix: str) -> str:
        """Return the full name of this weight's tensor that has the suffix `suffix`."""
        return self.stem + suffix

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors that may belong to the weight: codes, scales and the layout's optional tensors."""
        more = (self.stem + suffix for suffix in self.layout.more)
        return (self.codes, self.scale, *more, *(self.module + local for local in self.layout.beside))
