"""Describes the tensors in which a program stores a quantized weight: their names, and the rules that they must satisfy."""

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
LOW_RANK = ("svdquant_lora_", "weight_quantizer._svdquant_lora_")
"""What ModelOpt's names of two matrices begin with after the module's name. Their product belongs to the weight."""
Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
Tensors = Mapping[str, CheckpointTensor]
Config = Mapping[str, Any]
"""The content of config.json, or the quantization settings in it."""


class Layout(msgspec.Struct, frozen=True, eq=False):
    """The names that a program gives to the tensors of a weight, and the rules for these tensors. A name is a stem, which all
    tensors of the weight share, and a suffix: `x.q_proj.qweight` is `x.q_proj.` and `qweight`. Fields hold suffixes unless they say
    otherwise.
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
    """A tensor in the module that distinguishes weights of this layout from others with the same codes and scales, or ""."""
    alone: tuple[str, ...] = ()
    """Ends of names that prove that a tensor belongs to a quantized weight, even if the weight's other tensors are missing."""
    orphans: tuple[str, ...] = ()
    """Ends of the names of scales and zero points by which `check` recognizes them if their codes are missing."""
    proofs: tuple[str, ...] = ()
    """Tensors whose presence proves that a tensor with the unquantized weight's name holds codes."""
    several: bool = False
    """Whether an element of codes in int8 or float8 may hold several codes."""
    fused_scale: str = ""
    """A scale of the whole tensor, or "". It should be equal in layers that runtimes fuse into one."""
    more_scales: tuple[str, ...] = ()
    """Further tensors that hold scales of the weight."""
    exponents: bool = False
    """Whether scales stored as bytes are exponents of two."""
    signed: bool = False
    """Whether scales may be negative."""
    padded: Callable[[CheckpointTensor, CheckpointTensor], bool] = lambda codes, scale: False
    """A function of (codes, scales) that returns whether some scales are padding, which belongs to no codes and may be 0."""
    required: Callable[[CheckpointTensor, CheckpointTensor], tuple[str, ...]] = lambda codes, scale: ()
    """A function of (codes, scales) that returns the other tensors which the weight must have."""
    scale_shapes: Callable[[PackedWeight, Tensors, Config], Shapes] = lambda weight, tensors, config: ()
    """A function of (weight, all tensors, content of config.json) that returns the possible shapes of scales, or () if unknown."""
    part_shapes: Callable[[PackedWeight, Tensors, Config], Mapping[str, Shape]] = lambda weight, tensors, config: {}
    """A function like `scale_shapes` that returns the known shapes of other tensors of the weight, by suffix."""

    def holds_codes(self, name: str, dtype: str, tensors: Mapping[str, object]) -> bool:
        """Return whether a tensor's name and dtype, or tensors beside it (`proofs`), show that it holds codes of this layout."""
        if dtype not in self.dtypes:
            return False
        if self.codes in ("", "weight"):
            return any(name.removesuffix(self.codes) + suffix in tensors for suffix in self.proofs)
        return name.endswith(self.codes) and dtype in CODES_DTYPES

    def codes_of(self, name: str) -> str:
        """Return the name of a weight's codes, given the name of another of its tensors."""
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
