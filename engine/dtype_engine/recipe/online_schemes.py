"""The schemes in which runtimes quantize a checkpoint while they load it ("online"), and the formats with the same values.

The source for vLLM is its version 0.33: `_ONLINE_SHORTHANDS` in `vllm/config/quantization.py` for the names, and the modules of
`vllm/model_executor/layers/quantization/online/` for scales and activations. For `fp8_per_tensor` and `fp8_per_block`, vLLM
multiplies by the reciprocal of a scale, so that values in the middle between two codes may get the other one.

The source for SGLang is its version 0.5.23, `srt/layers/quantization`. For `fp8` and `mxfp8`, these are `Fp8LinearMethod` and
`Fp8MoEMethod` in `fp8.py`, which call `per_token_group_quant_fp8`, `scaled_fp8_quant` and `downcast_to_mxfp` of triton_kernels; for
`nvfp4_online`, it is `nvfp4_online.py`. For `fp8`, SGLang multiplies by reciprocals, too. Not listed are `w8a8_fp8`, which is `fp8`
without a way to leave layers wide, and schemes that are for AMD GPUs, NPUs or MLX alone.

A layer of a runtime may be several weights of the model: those that it fuses, such as q, k and v, and all experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dtype_engine.core import dtypes

Shape = Literal["matrix", "expert", "stack"]
"""How the model holds a weight: as a matrix, as the matrix of one expert, or as experts that are packed into one tensor."""
Formats = dict[Shape, tuple[str, ...]]
_FP8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True, eq=False)
class OnlineScheme:
    """One scheme of a runtime."""

    name: str
    """The runtime's name for it."""
    same: Formats
    """The formats that give weights the values that the scheme gives them, the one that is measured first."""
    others: tuple[str, ...]
    """Formats with the same codes and other scales, for which the scheme is written, too."""
    scales: str
    """What has one scale in the runtime, in words for the user."""
    inputs: str = ""
    """What depends on the machine, for the user: how the runtime rounds the inputs of layers, or whether it has the scheme."""
    inputs_of_experts: str = ""
    """How the runtime rounds the inputs of experts, for the user, if that is not as measured."""
    linear: bool = True
    """Whether the runtime has the scheme for linear layers, and not for experts alone."""

    def measured(self, shape: Shape) -> str:
        """Return the format that is measured for this scheme."""
        return (self.same[shape] or self.others)[0]


def _shapes(matrix: tuple[str, ...], stack: tuple[str, ...], expert: tuple[str, ...] | None = None) -> Formats:
    return {"matrix": matrix, "expert": matrix if expert is None else expert, "stack": stack}


def _alike(*formats: str) -> Formats:
    return _shapes(formats, formats)


VLLM = (
    OnlineScheme(
        "fp8_per_tensor",
        _shapes((f"{_FP8}@fused",), (_FP8,)),
        (f"{_FP8}@tensor", f"{_FP8}@fused"),
        "one scale for each fused layer, and for each expert",
        inputs_of_experts="the inputs of experts have one scale for all tokens in vLLM; here, they have one for each token",
    ),
    OnlineScheme(
        "fp8_per_channel",
        _shapes((_FP8, f"{_FP8}@row"), (f"{_FP8}@row",)),
        (),
        "a scale for each output",
    ),
    OnlineScheme(
        "fp8_per_block", _alike("fp8@128x128"), ("fp8@128x128:ue8m0",), "a float32 scale for each block of 128 x 128"
    ),
    OnlineScheme(
        "mxfp8",
        _alike("mxfp8:rceil"),
        ("mxfp8", "mxfp8:floor", "mxfp8:even"),
        "scales whose exponent is rounded up",
        "before Blackwell, vLLM leaves the inputs of mxfp8 layers wide: --quantize-activations none measures that",
    ),
    OnlineScheme(
        "mxfp4",
        _alike("mxfp4", "mxfp4:even"),
        ("mxfp4:floor", "mxfp4:rceil"),
        "scales whose exponent is rounded up from a mantissa of 1.75 on",
        "some of vLLM's kernels leave the inputs of mxfp4 linear layers wide: --quantize-activations none measures that",
    ),
    OnlineScheme(
        "int8_per_channel_weight_only",
        _shapes(("int8@row", "int8"), ("int8@row",)),
        ("int8", "int8@tensor"),
        "a scale for each output of each expert",
        linear=False,
    ),
    OnlineScheme(
        "nvfp4_per_token",
        _shapes(("nvfp4",), ()),
        ("nvfp4",),
        "a tensor scale for each expert",
        inputs_of_experts="the inputs of experts in nvfp4 have one more scale for each token in vLLM; here, they have one for all",
        linear=False,
    ),
)  # fmt: skip


SGLANG = (
    OnlineScheme(
        "fp8",
        _shapes((_FP8, f"{_FP8}@row"), (_FP8,), (f"{_FP8}@fused",)),
        (f"{_FP8}@tensor", f"{_FP8}@fused"),
        "a scale for each output of a linear layer, and for each expert",
        "before Ada, SGLang leaves the inputs of fp8 layers wide: --quantize-activations none measures that",
        "the inputs of experts have one scale for all tokens in SGLang; here, they have one for each token",
    ),
    OnlineScheme(
        "mxfp8",
        _alike("mxfp8:rceil"),
        ("mxfp8", "mxfp8:floor", "mxfp8:even"),
        "scales whose exponent is rounded up",
        "of NVIDIA GPUs, SGLang quantizes to mxfp8 on Blackwell only",
    ),
    OnlineScheme(
        "nvfp4_online",
        _alike(),
        ("nvfp4",),
        "a tensor scale for each expert, and the better one of two scales for each block",
        "of NVIDIA GPUs, SGLang quantizes to nvfp4 on Blackwell only",
        "the inputs of experts in nvfp4 have one more scale for each token in SGLang; here, they have one for all",
        linear=False,
    ),
)


def scheme_for(schemes: Sequence[OnlineScheme], dtype: str, shape: Shape) -> OnlineScheme | None:
    """Return the scheme with the values of a format or, without one, with the same codes and other scales, or None."""
    same = (scheme for scheme in schemes if dtype in scheme.same[shape])
    others = (scheme for scheme in schemes if dtype in (*scheme.same["matrix"], *scheme.others))
    return next(same, None) or next(others, None)


def formats_of(schemes: Sequence[OnlineScheme]) -> tuple[str, ...]:
    """Return the formats of recipes for which there is a scheme."""
    shapes: tuple[Shape, ...] = ("matrix", "expert", "stack")
    return tuple(
        name for name in dtypes.STORED_FORMATS if any(scheme_for(schemes, name, shape) is not None for shape in shapes)
    )
