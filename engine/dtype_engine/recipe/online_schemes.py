"""The schemes in which vLLM quantizes a checkpoint while it loads it ("online"), and the formats with the same values.

The source is vLLM 0.33: `_ONLINE_SHORTHANDS` in `vllm/config/quantization.py` for the names, and the modules of
`vllm/model_executor/layers/quantization/online/` for scales and activations. A layer of vLLM may be several weights of the model:
those that it fuses, such as q, k and v, and all experts. For `fp8_per_tensor` and `fp8_per_block`, vLLM multiplies by the
reciprocal of a scale, so that values in the middle between two codes may get the other one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dtype_engine.core import dtypes

Shape = Literal["matrix", "stack"]
"""How the model holds a weight: as a matrix, or as experts that are packed into one tensor."""
_FP8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True, eq=False)
class OnlineScheme:
    """One scheme of vLLM."""

    name: str
    """vLLM's shorthand."""
    same: dict[Shape, tuple[str, ...]]
    """The formats that give weights the values that the scheme gives them, the one that is measured first."""
    others: tuple[str, ...]
    """Formats with the same codes and other scales, for which the scheme is written, too."""
    scales: str
    """What has one scale in vLLM, in words for the user."""
    inputs: str = ""
    """How vLLM rounds the inputs of layers, for the user, if that depends on the machine."""
    inputs_of_experts: str = ""
    """How vLLM rounds the inputs of experts, for the user, if that is not as measured."""
    linear: bool = True
    """Whether vLLM has the scheme for linear layers, and not for experts alone."""

    def measured(self, shape: Shape) -> str:
        """Return the format that is measured for this scheme."""
        return (self.same[shape] or self.others)[0]


def _alike(*formats: str) -> dict[Shape, tuple[str, ...]]:
    return {"matrix": formats, "stack": formats}


SCHEMES = (
    OnlineScheme(
        "fp8_per_tensor",
        {"matrix": (f"{_FP8}@fused",), "stack": (_FP8,)},
        (f"{_FP8}@tensor", f"{_FP8}@fused"),
        "one scale for each fused layer, and for each expert",
        inputs_of_experts="the inputs of experts have one scale for all tokens in vLLM; here, they have one for each token",
    ),
    OnlineScheme(
        "fp8_per_channel",
        {"matrix": (_FP8, f"{_FP8}@row"), "stack": (f"{_FP8}@row",)},
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
        {"matrix": ("int8@row", "int8"), "stack": ("int8@row",)},
        ("int8", "int8@tensor"),
        "a scale for each output of each expert",
        linear=False,
    ),
    OnlineScheme(
        "nvfp4_per_token",
        {"matrix": ("nvfp4",), "stack": ()},
        ("nvfp4",),
        "a tensor scale for each expert",
        inputs_of_experts="the inputs of experts in nvfp4 have one more scale for each token in vLLM; here, they have one for all",
        linear=False,
    ),
)  # fmt: skip


def scheme_for(dtype: str, shape: Shape) -> OnlineScheme | None:
    """Return the scheme with the values of a format or, without one, with the same codes and other scales, or None."""
    same = (scheme for scheme in SCHEMES if dtype in scheme.same[shape])
    others = (scheme for scheme in SCHEMES if dtype in (*scheme.same["matrix"], *scheme.others))
    return next(same, None) or next(others, None)


FORMATS = tuple(name for name in dtypes.STORED_FORMATS if scheme_for(name, "matrix") or scheme_for(name, "stack"))
"""The formats of recipes for which there is a scheme."""
