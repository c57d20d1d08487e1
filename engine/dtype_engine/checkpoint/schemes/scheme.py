"""Describes a scheme, which is a way in which a program stores the weights that it quantized, and one such weight.

A module of this package that has a `SCHEME` is a scheme, and `registry` finds it by that. All that is known of it is there, but for
the arithmetic, which is in a module of `runtime/formats/schemes`.
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
"""The key in `CodedWeight.parts` of the tensor that has a code for each value, which every coded weight has."""
MOST_EXPERTS = 4096
"""The most experts in a tensor that is split into a weight for each expert."""
Metadata = Mapping[str, str]
"""The metadata of the headers of safetensors files."""


class Scheme(msgspec.Struct, frozen=True, eq=False):
    """A way in which a program stores the weights that it quantized."""

    name: str
    """The beginning of the names of its formats, such as "gptq"."""
    decoder: str
    """The module of `runtime/formats/schemes` that computes the values of a weight."""
    read: Callable[[Tensors, Config, Metadata], Weights] = lambda tensors, config, metadata: iter(())
    """Takes all tensors of safetensors files by name, the content of config.json, and the metadata of the files' headers. Yields
    the weights, and None for those whose tensors do not fit together. Raises UserError if a small tensor can't be read.
    """
    layouts: tuple[Layout, ...] = ()
    """The names and shapes of the weights' tensors, which are known even of weights that can't be decoded."""
    rank: int = 0
    """Lower ranks are tried first, equal ones in the order of the modules' names. The first that reads a weight has it."""
    describing: tuple[str, ...] = ()
    """The ends of the names of small tensors whose values `read` needs, such as a tensor that holds a shape."""
    beside: tuple[str, ...] = (
        ".input_scale", ".input_global_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".k_scale", ".v_scale",
        ".activation_scale", ".scale_input",
    )  # fmt: skip
    """Ends of names in a weight's module that belong to the layer's inputs or outputs or the KV cache, not to the weight."""
    of_inputs: tuple[str, ...] = (".input_scale", ".input_global_scale", ".activation_scale")
    """The ends of the names of those in `beside` that hold one scale for all inputs of the layer."""
    input_format: Callable[[CodedWeight, Config], str] = lambda weight, settings: ""
    """Takes a weight and the quantization settings in config.json. Returns the format of `core.dtypes` to which runtimes round the
    inputs of its layer, such as "int8", or "". If it ends with "@tensor", the files have the scale.
    """
    reciprocal_scales: bool = False
    """Whether the files hold the reciprocals of NVFP4's scales of whole tensors."""
    fused: bool = True
    """Whether runtimes fuse layers of this scheme into one, such as the projections to queries, keys and values."""
    left_out: Callable[[Iterable[str], Tensors, Metadata], set[str]] = lambda codes, tensors, metadata: set()
    """Takes names of codes, all tensors, and the metadata. Returns the codes in a format that is left unread on purpose."""
    settings_files: tuple[str, ...] = ()
    """The files beside config.json that hold quantization settings, of which some are nowhere else."""
    nested_settings: tuple[str, ...] = ()
    """The keys under which the settings of all weights are in the quantization settings, each inside the one before."""
    ignored: tuple[str, ...] = ()
    """The keys under which the quantization settings may list the modules that are not quantized."""
    ignored_by: tuple[str, ...] = ()
    """The quantization methods for which transformers does not quantize the modules under the first key of `ignored`."""
    cache_formats: Callable[[Config], tuple[tuple[str, str, str], ...]] = lambda settings: ()
    """Takes the quantization settings in config.json. Returns the formats of KV caches in them, as `KVCache.declared` has them."""
    own: bool = False
    """Whether this is how exports of this program store weights, in formats of `core.dtypes`, such as `int8`."""


class CodedWeight(msgspec.Struct, frozen=True, gc=False):
    """A weight that the files store as codes, with the scales and other tensors that turn codes into values."""

    name: str
    """Its name in the unquantized checkpoint, such as `model.layers.0.mlp.down_proj.weight`."""
    shape: tuple[int, ...]
    """Its shape in the unquantized checkpoint: [out, in], or [experts, out, in] for stacked experts."""
    scheme: Scheme
    format: str
    """Such as `gptq:int4@g128` or `fp8:e4m3@128x128` or, if it is `own`, a format of `core.dtypes` such as `nvfp4`."""
    parts: Mapping[str, CheckpointTensor]
    """The tensors in the files by their role in the scheme, such as "codes", "scale" or "zero_point"."""
    settings: Mapping[str, Any] = MappingProxyType({})
    """What the decoder needs besides the tensors, such as {"bits": 4, "group": 128}."""
    beside: tuple[CheckpointTensor, ...] = ()
    """Tensors that belong to the weight but do not change its values, such as the scale of the layer's inputs."""

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
        """The scale of all inputs of the layer, if the files have it. For NVFP4, it is that of the blocks' scales."""
        ends = self.scheme.of_inputs
        return next((part for part in self.beside if part.name.endswith(ends) and not part.absent), None)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors of the weight in the files."""
        return sum(tensor.nbytes for tensor in self.tensors)


Weights = Iterator[CodedWeight | None]
