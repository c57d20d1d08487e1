"""Recognizes weights that other programs quantized: which tensors of a file (codes, scales, ...) form such a weight. These tensors
are never cast.

A layout is recognized by the names that a program gives to a weight's tensors, and by the dtype of the codes. The names are taken
from AutoGPTQ, AutoAWQ, bitsandbytes, compressed-tensors, torchao, optimum-quanto, HQQ, NVIDIA ModelOpt, ComfyUI, mlx-lm, and from
the checkpoints of DeepSeek and gpt-oss as transformers 5.23 loads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable

_FP8 = frozenset({"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"})
_BYTES = frozenset({"int8", "uint8"})
_WORDS = frozenset({"int32", "uint32"})
_CODES = _FP8 | _BYTES | _WORDS | {"int16", "uint16", "float4_e2m1fn_x2"}
_SCALE_WORD = re.compile(
    r"scal(e|ing)|zero|absmax|quant|codebook|g_idx|_shift|^q?biases$|^s$|^S[UV]$|^smooth_|^weight_bias$|^(proj|lora)_(up|down)$"
)
"""Matches the last part of a tensor's name if the tensor belongs to quantized codes, as `weight_scale` and `qzeros` do."""
_TABLE_WORD = re.compile(r"centroids|codebook")
"""Matches the name of a module that holds a table of values for the codes of its parent module. For example, VPTQ's `x.centroids`
holds the table for the codes of `x`.
"""
_OF_INPUTS = re.compile(r"(^|_)([kvq]|kv|input|output|activation)_scale$|scale_input$|_act$")
"""Matches the last part of a scale's name, such as `k_scale` or `input_scale`, if the scale belongs to inputs, outputs or the
key-value cache. Such a scale does not belong to codes.
"""
OF_ACTIVATIONS = "is a scale of activations or of the key-value cache by its name"
"""The reason, for the user, why scales whose names match `_OF_INPUTS` are not cast."""


class Stored(Protocol):
    """The interface of a tensor in a file: its dtype and its shape."""

    @property
    def dtype(self) -> str:
        """torch's name of the tensor's dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape in the file."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The names that one quantization program gives to the tensors of a weight. Each name is a stem, which they share, and a
    suffix: `x.q_proj.qweight` is the stem `x.q_proj.` and the suffix `qweight`. The fields hold the suffixes.
    """

    what: str
    """Words that describe the weight to the user and complete "a weight that is ...", such as "packed by compressed-tensors"."""
    codes: str
    scale: str
    """The suffix of the tensor of scales, without which the codes can't be read."""
    dtypes: frozenset[str]
    """The dtypes that codes may have. A tensor with the name of codes but another dtype is a plain weight."""
    more: tuple[str, ...] = ()
    """Suffixes of optional tensors other than codes and scales, such as zero points."""
    beside: tuple[str, ...] = ()
    """Suffixes of optional tensors that are named after the weight's module, such as `x.input_scale` for `x.weight`. All other
    suffixes are added to the weight's stem.
    """
    alone: tuple[str, ...] = ()
    """Suffixes that the name of an unquantized tensor never has. A tensor with such a suffix belongs to a quantized weight, even if
    its scales or other tensors are missing.
    """


BLOCK_SCALED = Layout(
    "fp8 with block scales (DeepSeek)", "", "_scale_inv", _FP8, beside=("activation_scale", "input_scale"),
    alone=("weight_scale_inv",),
)  # fmt: skip
COMPRESSED = Layout(
    "packed by compressed-tensors", "_packed", "_scale", _BYTES | _WORDS,
    ("_shape", "_zero_point", "_g_idx", "_global_scale"), ("input_global_scale",), ("weight_packed",),
)  # fmt: skip
SCALED = Layout(
    "quantized with scales (compressed-tensors)", "", "_scale", _FP8 | _BYTES | {"int32"},
    ("_zero_point", "_scale_2", "_offset", "_shape"),
    ("input_scale", "output_scale", "input_zero_point", "input_offset", "pre_quant_scale", "deq_scale", "quant_bias",
     "comfy_quant"),
)  # fmt: skip
BNB_4BIT = Layout(
    "4-bit by bitsandbytes", "", ".absmax", frozenset({"uint8", "bfloat16", "float16", "float32"}),
    (".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__nf4",
     ".quant_state.bitsandbytes__fp4"),
    alone=(".absmax", ".quant_map"),
)  # fmt: skip
BNB_8BIT = Layout("int8 by bitsandbytes", "weight", "SCB", frozenset({"int8"}), ("weight_format",), alone=(".SCB",))
GPTQ = Layout(
    "packed by GPTQ or AWQ", "qweight", "scales", _WORDS | {"int16"}, ("qzeros", "g_idx", "bias_scales", "scaled_zeros"),
    alone=(".qweight", ".qzeros"),
)  # fmt: skip
HQQ = Layout(
    "packed by HQQ", "W_q", "scale", _BYTES | _WORDS,
    ("zero", "meta", "axis", "channel_wise", "compute_dtype", "encoded_state_dict", "group_size", "nbits", "offload_meta",
     "optimize", "packing", "quant_scale", "quant_zero", "round_zero", "shape", "stores_quant_config", "unpack_view_dtype",
     "view_as_float"),
    alone=(".W_q",),
)  # fmt: skip
MLX = Layout("packed by MLX", "weight", "scales", frozenset({"uint32"}), ("biases", "qbiases"))
DEEPSEEK_V4 = Layout("fp4 or fp8 with block scales (DeepSeek-V4)", "weight", "scale", _FP8 | {"int8"})
GPT_OSS = Layout("MXFP4 (gpt-oss)", "_blocks", "_scales", frozenset({"uint8"}))
TORCHAO = Layout(
    "quantized by torchao", "_weight_qdata", "_weight_scale", _CODES, ("_weight_zero_point", "_weight_per_tensor_scale"),
    alone=("._weight_qdata",),
)  # fmt: skip
QUANTO_BITS = Layout(
    "packed by optimum-quanto", "._data._data", "._scale", _BYTES, ("._shift",), ("input_scale", "output_scale"),
    ("weight._data._data",),
)  # fmt: skip
QUANTO = Layout(
    "quantized by optimum-quanto", "._data", "._scale", _FP8 | _BYTES, ("._shift",), ("input_scale", "output_scale"),
    ("weight._data",),
)  # fmt: skip
COMFY_MARK = "scaled_fp8"
"""The name of a tensor without values of its own, which tells ComfyUI that the file has fp8 weights with scales."""
COMFY = Layout(
    "fp8 with scales (ComfyUI)", "weight", "scale_weight", _FP8, ("scale_input",), alone=(".scale_weight", COMFY_MARK)
)
SPARSE = Layout(
    "sparse (compressed-tensors)", "compressed", "bitmask", frozenset({"bfloat16", "float16", "float32", *_FP8}),
    ("shape", "row_offsets", "scale"), ("weight_scale",),
)  # fmt: skip
LAYOUTS = (
    BLOCK_SCALED,
    COMPRESSED,
    SCALED,
    BNB_4BIT,
    BNB_8BIT,
    GPTQ,
    HQQ,
    MLX,
    DEEPSEEK_V4,
    GPT_OSS,
    TORCHAO,
    QUANTO_BITS,
    QUANTO,
    COMFY,
    SPARSE,
)
_SCALE_ENDS = tuple({layout.scale for layout in LAYOUTS})
_ALONE_ENDS = tuple(end for layout in LAYOUTS for end in layout.alone)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight that another program quantized, with the names of its tensors (codes, scales, ...) in the file."""

    layout: Layout
    stem: str

    @property
    def name(self) -> str:
        """The weight's name before quantization, such as `x.weight` for `x.weight_packed` or `x.qweight`."""
        return f"{self.stem}weight" if self.stem.endswith(".") else self.stem

    @property
    def codes(self) -> str:
        """The name of the tensor that holds the weight's codes."""
        return self.stem + self.layout.codes

    @property
    def scale(self) -> str:
        """The name of the tensor that holds the weight's scales."""
        return self.stem + self.layout.scale

    def part(self, suffix: str) -> str:
        """Return the full name of this weight's tensor that has the suffix `suffix`."""
        return self.stem + suffix

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors that may belong to the weight: codes, scales and the layout's optional tensors."""
        module = self.stem[: self.stem.rfind(".") + 1]
        more = (self.stem + suffix for suffix in self.layout.more)
        return (self.codes, self.scale, *more, *(module + local for local in self.layout.beside))


def packed_weights(tensors: Mapping[str, Stored]) -> list[PackedWeight]:
    """Find the weights that other programs quantized, by the names and dtypes of their tensors. Weights that lack their codes or
    their scales are left out. tensors: all tensors of a file, by name.
    """
    found = []
    for name in tensors:
        if not name.endswith(_SCALE_ENDS):
            continue
        for layout in LAYOUTS:
            if not name.endswith(layout.scale):
                continue
            stem = name[: -len(layout.scale)]
            codes = tensors.get(stem + layout.codes)
            if codes is not None and codes.dtype in layout.dtypes and stem + layout.codes != name:
                found.append(PackedWeight(layout, stem))
                break
    return found


def quantized_parts(tensors: Mapping[str, Stored], config: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Find the tensors (codes, scales, ...) that belong to weights which other programs quantized, and which are therefore never
    cast. Returns the reason for each, by tensor name.

    tensors: all tensors of a file, by name. config: the content of config.json. If it describes the quantization method, the
    reasons contain this description.
    """
    described = declared_scheme(config)
    found: dict[str, str] = {}
    for weight in packed_weights(tensors):
        why = f"part of a weight that is {described or weight.layout.what}"
        found |= {name: why for name in weight.names if name in tensors}
    in_module: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if name in found:
            continue
        if name.endswith(_ALONE_ENDS):
            layout = next(each for each in LAYOUTS if each.alone and name.endswith(each.alone))
            found[name] = f"part of a weight that is {described or layout.what}"
        elif tensor.dtype == "float8_e8m0fnu":
            found[name] = "holds exponents of two (E8M0), which are the scales of a quantized weight"
        elif tensor.dtype in _CODES and len(tensor.shape) > 1:
            in_module.setdefault(module_of(name), []).append(name)
    holders = {module_of(name): name for name, each in tensors.items() if each.dtype in _CODES and len(each.shape) > 1}
    for name in tensors if holders else ():
        module, _, local = name.rpartition(".")
        if module not in holders and _TABLE_WORD.search(module.rpartition(".")[2]):
            module, local = module_of(module), "codebook"
        if name in found:
            continue
        if module in holders and _SCALE_WORD.search(local):
            codes = holders[module]
            held = dtypes.short_name(tensors[codes].dtype)
            found[name] = f"belongs to {codes.rpartition('.')[2]} by its name, which holds {held} codes"
            for other in in_module.get(module, ()) if not _OF_INPUTS.search(local) else ():
                if tensors[other].dtype in _FP8:  # codes of other dtypes are never cast
                    found.setdefault(other, f"holds {held} codes, to which {printable(local)} belongs by its name")
        elif _OF_INPUTS.search(local):
            found[name] = OF_ACTIVATIONS
    return found


def module_of(name: str) -> str:
    """Return the name of the module that contains a tensor or module: all but the last part of the name."""
    return name.rpartition(".")[0]


def declared_method(config: Mapping[str, Any] | None) -> str | None:
    """Return the `quant_method`, such as "gptq", that a config.json declares, or None if it declares none."""
    declared = (config or {}).get("quantization_config")
    method = declared.get("quant_method") if isinstance(declared, Mapping) else None
    return str(method) if method else None


def declared_scheme(config: Mapping[str, Any] | None) -> str | None:
    """Return how the `quantization_config` of a config.json says that the weights are quantized, such as "quantized by gptq, 4
    bit", or None if it says nothing. The words complete "a weight that is ...".
    """
    method = declared_method(config)
    if method is None:
        return None
    declared = (config or {})["quantization_config"]
    bits = declared.get("bits") or (4 if declared.get("load_in_4bit") else 8 if declared.get("load_in_8bit") else None)
    if method == "fp8" and declared.get("weight_block_size"):
        return "fp8 with block scales"
    return f"quantized by {printable(method, 40)}" + (f", {bits} bit" if isinstance(bits, int) else "")


def names_of_parts(weights: Iterable[PackedWeight], tensors: Mapping[str, Stored]) -> set[str]:
    """Return the names of all tensors of a file that store one of the given weights: codes, scales, zero points and so on. weights:
    the weights that another program quantized. tensors: all tensors of the file, by name.
    """
    return {name for weight in weights for name in weight.names if name in tensors}
