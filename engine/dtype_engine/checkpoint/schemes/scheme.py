"""Describes a scheme, which is a way in which a program stores the weights that it quantized, and a weight of a scheme.

`registry` finds the modules of this package that have a `SCHEME`. Such a module has all about its scheme except for the arithmetic,
which is in a module of `runtime/formats/schemes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor

if TYPE_CHECKING:
    from dtype_engine.checkpoint.schemes.layout import Config, Layout, Tensors

CODES = "codes"
"""The key in `CodedWeight.parts` of the tensor with the codes. Every coded weight has it."""
MOST_EXPERTS = 4096
"""A tensor with more experts is not split into a weight for each expert."""
Metadata = Mapping[str, str]
"""The metadata of the headers of safetensors files."""


class Declared(msgspec.Struct, frozen=True):
    """What quantization settings in config.json say about the weights of a scheme, to find files that contradict the settings."""

    covers: Callable[[Config], bool] = lambda settings: False
    """Takes the quantization settings in config.json. Returns whether `read` reads all weights that are quantized as they say, so
    that others contradict them.
    """
    needs_codes: Callable[[Config], bool] = lambda settings: False
    """Takes the quantization settings in config.json. Returns whether loaders then look for codes of this scheme, and do not
    quantize plain weights as they load them.
    """
    needed_parts: Callable[[Config], tuple[tuple[str, str], ...]] = lambda settings: ()
    """Takes the quantization settings in config.json. Returns (key in `CodedWeight.parts`, why loaders need this tensor) for
    tensors that other settings do not need.
    """
    zero_points: Callable[[CodedWeight, Config], tuple[CheckpointTensor, bytes] | None] = lambda weight, settings: None
    """Takes a weight and the quantization settings in config.json. Returns the tensor of its zero points and the bytes that each of
    its rows repeats if the codes are symmetric, or None if they need not be.
    """


class Scheme(msgspec.Struct, frozen=True, eq=False):
    """A way in which a program stores the weights that it quantized."""

    name: str
    """The beginning of the names of its formats, such as "gptq"."""
    decoder: str
    """The module of `runtime/formats/schemes` that computes the values of a weight."""
    read: Callable[[Tensors, Config, Metadata], Weights] = lambda tensors, config, metadata: iter(())
    """A function of (all tensors of safetensors files by name, content of config.json, metadata of the files' headers) that yields
    the weights, and None for weights whose tensors do not fit together. Raises UserError if a small tensor can't be read.
    """
    layouts: tuple[Layout, ...] = ()
    """The names and shapes of the weights' tensors, also of weights that can't be decoded."""
    rank: int = 0
    """Schemes are tried in the order of their ranks, then of their modules' names. A weight belongs to the first that reads it."""
    describing: tuple[str, ...] = ()
    """The ends of the names of small tensors whose values `read` needs, such as a tensor that holds a shape."""
    beside: tuple[str, ...] = (
        ".input_scale", ".input_global_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".k_scale", ".v_scale",
        ".activation_scale", ".scale_input",
    )  # fmt: skip
    """Ends of names in a weight's module that belong to the layer's inputs or outputs or the KV cache, not to the weight."""
    of_inputs: tuple[str, ...] = (".input_scale", ".input_global_scale", ".activation_scale")
    """The ends in `beside` of names of tensors that hold one scale for all inputs of the layer."""
    input_format: Callable[[CodedWeight, Config], str] = lambda weight, settings: ""
    """A function of (weight, quantization settings in config.json) that returns the format of `core.dtypes` to which runtimes round
    the inputs of the weight's layer, such as "int8", or "". If the format ends with "@tensor", the files have the scale.
    """
    declared: Declared = Declared()
    """What the quantization settings in config.json say about the weights."""
    reciprocal_scales: bool = False
    """Whether the files hold the reciprocals of NVFP4's scales of whole tensors."""
    fused: bool = True
    """Whether runtimes fuse layers of this scheme into one, such as the projections to queries, keys and values."""
    left_out: Callable[[Iterable[str], Tensors, Metadata], set[str]] = lambda codes, tensors, metadata: set()
    """A function of (names of codes, all tensors, metadata) that returns the names of codes whose format is not read on purpose."""
    settings_files: tuple[str, ...] = ()
    """The files beside config.json that hold quantization settings, some of which may be missing in config.json. An export that
    copies all codes copies these files, too.
    """
    nested_settings: tuple[str, ...] = ()
    """The path of keys in the quantization settings to the settings that hold for all weights."""
    ignored: tuple[str, ...] = ()
    """The keys under which the quantization settings may list the modules that are not quantized."""
    ignored_by: tuple[str, ...] = ()
    """The quantization methods for which transformers leaves the modules under the first key of `ignored` unquantized."""
    cache_formats: Callable[[Config], tuple[tuple[str, str, str], ...]] = lambda settings: ()
    """A function of the quantization settings in config.json that returns their formats of KV caches, as `KVCache.declared`."""
    own: bool = False
    """Whether this is the scheme of this program's own exports, with formats of `core.dtypes` such as `int8`."""


class CodedWeight(msgspec.Struct, frozen=True, gc=False):
    """A weight that the files store as codes, with the scales and other tensors that turn codes into values."""

    name: str
    """The weight's name in the unquantized checkpoint, such as `model.layers.0.mlp.down_proj.weight`."""
    shape: tuple[int, ...]
    """The weight's shape in the unquantized checkpoint: [out, in], or [experts, out, in] for stacked experts."""
    scheme: Scheme
    format: str
    """The format: `gptq:int4@g128` or `fp8:e4m3@128x128`, for example, or a format of `core.dtypes` such as `nvfp4` if `own`."""
    parts: Mapping[str, CheckpointTensor]
    """The tensors in the files by their role in the scheme, such as "codes", "scale" or "zero_point"."""
    settings: Mapping[str, Any] = MappingProxyType({})
    """What the decoder needs besides the tensors, such as {"bits": 4, "group": 128}."""
    beside: tuple[CheckpointTensor, ...] = ()
    """Tensors that belong to the weight but do not change its values, such as the scale of the layer's inputs."""
    values_as: str = ""
    """The dtype that the weight has in the module and in an export without rules, if the tensors tell it, as those of a weight with
    an adapter do. "": the configuration tells it, and an export without rules copies the tensors.
    """

    @property
    def own(self) -> bool:
        """Whether an export of this program stored the weight, in a format of `core.dtypes`."""
        return self.scheme.own

    @property
    def tensors(self) -> tuple[CheckpointTensor, ...]:
        """All tensors of the weight in the files."""
        return (*self.parts.values(), *self.beside)

    @property
    def input_scale(self) -> CheckpointTensor | None:
        """The scale that all inputs of the layer share. For NVFP4, it scales the scales of the inputs' blocks. None if there is no
        such scale, or its value is not on this machine.
        """
        ends = self.scheme.of_inputs
        return next((part for part in self.beside if part.name.endswith(ends) and not part.absent), None)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors of the weight in the files."""
        return sum(tensor.nbytes for tensor in self.tensors)


Weights = Iterator[CodedWeight | None]
