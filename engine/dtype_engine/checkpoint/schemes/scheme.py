"""Describes a scheme, which is a way in which a program stores the weights that it quantized, and one such weight.

A module of this package that has a `SCHEME` is a scheme, and `registry` finds it by that. Everything that this program knows of a
scheme is in this module, but for the arithmetic, which is in a module of `runtime/formats/schemes`.
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
"""The key in `CodedWeight.parts` of the tensor that has a code for each value. Every coded weight has such a tensor."""
MOST_EXPERTS = 4096
"""The maximum number of experts in a tensor that is split into a weight for each expert."""
Metadata = Mapping[str, str]
"""The metadata of the headers of safetensors files."""


class Scheme(msgspec.Struct, frozen=True, eq=False):
    """A way in which a program stores the weights that it quantized."""

    name: str
    """The name of the scheme, with which the names of its formats begin, such as "gptq"."""
    decoder: str
    """The name of the module of `runtime/formats/schemes` that computes the values of a weight."""
    read: Callable[[Tensors, Config, Metadata], Weights] = lambda tensors, config, metadata: iter(())
    """Takes all tensors of safetensors files by name, the content of config.json, and the metadata of the files' headers. Yields
    the scheme's weights, and None for those whose tensors do not fit together. Raises UserError if a small tensor that describes a
    weight can't be read.
    """
    layouts: tuple[Layout, ...] = ()
    """The names and shapes of the weights' tensors, which are known even of weights that can't be decoded."""
    rank: int = 0
    """Schemes with a lower rank are tried first, and those with equal ranks in the order of the names of their modules. The first
    that reads a weight has it.
    """
    describing: tuple[str, ...] = ()
    """The ends of the names of small tensors whose values `read` needs, such as a tensor that holds a shape."""
    beside: tuple[str, ...] = (
        ".input_scale", ".input_global_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".k_scale", ".v_scale",
        ".activation_scale", ".scale_input",
    )  # fmt: skip
    """The ends of the names of tensors in a weight's module that belong to inputs or outputs of the layer or to the KV cache. They
    do not change the values of the weight.
    """
    of_inputs: tuple[str, ...] = (".input_scale", ".input_global_scale", ".activation_scale")
    """The ends of the names of those tensors in `beside` that hold one scale for all inputs of the layer."""
    input_format: Callable[[CodedWeight, Config], str] = lambda weight, settings: ""
    """Takes a weight and the quantization settings in config.json. Returns the format of `core.dtypes` to which runtimes round the
    inputs of the weight's layer, such as "int8", or "". If it ends with "@tensor", the files have the scale.
    """
    reciprocal_scales: bool = False
    """Whether the files hold the reciprocals of NVFP4's scales of whole tensors."""
    fused: bool = True
    """Whether runtimes fuse layers of this scheme into one, such as the projections to queries, keys and values."""
    left_out: Callable[[Iterable[str], Tensors, Metadata], set[str]] = lambda codes, tensors, metadata: set()
    """Takes names of codes, all tensors, and the metadata of the headers. Returns those codes that are left unread on purpose,
    because the files say that they are in another format.
    """
    settings_files: tuple[str, ...] = ()
    """The names of files beside config.json that hold quantization settings. Some programs write the settings only there."""
    nested_settings: tuple[str, ...] = ()
    """The keys under which the quantization settings hold the settings of all weights in a mapping of their own, such as
    ("quantization",).
    """
    ignored: tuple[str, ...] = ()
    """The keys under which the quantization settings may list the modules that are not quantized."""
    ignored_by: tuple[str, ...] = ()
    """The quantization methods for which transformers does not quantize the modules that the first key of `ignored` lists."""
    own: bool = False
    """Whether an export of this program stores weights so, whose formats are formats of `core.dtypes`, such as `int8`."""


class CodedWeight(msgspec.Struct, frozen=True, gc=False):
    """A weight that the files store as codes, with the scales and other tensors that turn codes into values."""

    name: str
    """The name of the weight in the unquantized checkpoint, such as `model.layers.0.mlp.down_proj.weight`."""
    shape: tuple[int, ...]
    """The shape of the weight in the unquantized checkpoint: [out, in], or [experts, out, in] for stacked experts."""
    scheme: Scheme
    """The scheme in which the weight is stored."""
    format: str
    """The name of the weight's format, such as `gptq:int4@g128` or `fp8:e4m3@128x128`: the method, the type of a code, and the size
    of a block. In an export of this program, it is a format of `core.dtypes`, such as `int8` or `nvfp4`.
    """
    parts: Mapping[str, CheckpointTensor]
    """The tensors in the files that store the weight, keyed by their role in the scheme, such as "codes", "scale" or
    "zero_point".
    """
    settings: Mapping[str, Any] = MappingProxyType({})
    """What the decoder needs besides the tensors, such as {"bits": 4, "group": 128}. The keys depend on the scheme."""
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
        """The tensor with the scale of all inputs of the weight's layer, or None if the files have none. For NVFP4, it is the scale
        of the scales of blocks.
        """
        ends = self.scheme.of_inputs
        return next((part for part in self.beside if part.name.endswith(ends) and not part.absent), None)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors of the weight in the files."""
        return sum(tensor.nbytes for tensor in self.tensors)


Weights = Iterator[CodedWeight | None]
