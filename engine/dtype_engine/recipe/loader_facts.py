"""Facts about transformers: which values its `from_pretrained` loads from an export for weights that are stored with scales. Each
fact was tested with transformers 5.23 and 5.24 and compressed-tensors 0.20 (the fp8 layout of DeepSeek also with accelerate 1.15),
and the tests check each of them with the installed versions.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass
from enum import StrEnum

from dtype_engine.core import dtypes
from dtype_engine.core.tree import TensorInfo, Tree, ancestors
from dtype_engine.recipe.schemes import DESCRIBED, PER_CHANNEL, layout, weight_scheme


class Outcome(StrEnum):
    """What transformers' `from_pretrained` loads, compared with the values that `load_pretrained` loads. Each outcome is a sentence
    for the README of an export, in which `{wide}` stands for the dtype in `config.json`.
    """

    SAME = "the same values"
    LAST_BITS = "the same but for the last bits, since scales are applied in {wide}"
    BFLOAT16 = "rounded to bfloat16"
    COMPUTED_IN_BFLOAT16 = "rounded to bfloat16, and computed in it"
    FAILS_TO_RUN = "an error in the forward pass: these weights come in bfloat16, and their inputs in {wide}"
    FAILS_TO_LOAD = "an error on loading: transformers expects zero points that are not packed"
    TAKEN_FOR_ONE_FORMAT = "an error or wrong values: transformers takes all linear layers for one format"


@dataclass(frozen=True, slots=True)
class LoaderFacts:
    """What `from_pretrained` loads for weights in one format."""

    plain: Outcome
    """The outcome without further arguments."""
    plain_same_in: Container[str]
    """The dtypes in `config.json` with which the loaded values are the same, so that `plain` does not apply."""
    dequantized: Outcome
    """The outcome with `CompressedTensorsConfig(dequantize=True)`."""
    dequantized_same_in: Container[str]

    def outcome(self, wide: str, dequantize: bool) -> Outcome:
        """Return what is loaded if `config.json` names the dtype `wide`. dequantize: whether `dequantize=True` is passed."""
        if wide in (self.dequantized_same_in if dequantize else self.plain_same_in):
            return Outcome.SAME
        return self.dequantized if dequantize else self.plain


_ANY = dtypes.COMPUTE_DTYPES
_ALWAYS_SAME = LoaderFacts(Outcome.SAME, _ANY, Outcome.SAME, _ANY)
_FLOAT32_SCALES = LoaderFacts(Outcome.LAST_BITS, ("float32",), Outcome.SAME, _ANY)
_LAYERS = {
    "float-quantized": _FLOAT32_SCALES,
    "int-quantized": _FLOAT32_SCALES,
    "mxfp8-quantized": LoaderFacts(Outcome.FAILS_TO_RUN, ("bfloat16",), Outcome.SAME, _ANY),
    "mxfp4-pack-quantized": LoaderFacts(Outcome.FAILS_TO_RUN, ("bfloat16",), Outcome.SAME, _ANY),
    "nvfp4-pack-quantized": LoaderFacts(Outcome.FAILS_TO_RUN, ("bfloat16",), Outcome.BFLOAT16, ("bfloat16",)),
    "pack-quantized": LoaderFacts(Outcome.SAME, _ANY, Outcome.BFLOAT16, ("bfloat16",)),
    "fp8": _ALWAYS_SAME,
}
"""The facts about linear layers, by the layout of their weights."""
_ZERO_POINTS = LoaderFacts(Outcome.FAILS_TO_LOAD, (), Outcome.BFLOAT16, ("bfloat16",))
_WIDENED_EXPERTS = LoaderFacts(Outcome.COMPUTED_IN_BFLOAT16, ("bfloat16",), Outcome.COMPUTED_IN_BFLOAT16, ("bfloat16",))
"""The facts about experts in formats with a scale for each block. transformers dequantizes experts when it packs them."""


def loaded_dtype(tree: Tree, tensor: TensorInfo, dtype: str, of_diffusers: bool = False) -> str:
    """Return a tensor's dtype after `from_pretrained(dtype=...)`. float16 becomes float32 for tensors that the model's class lists
    in `_keep_in_fp32_modules`. Both float16 and bfloat16 do for those in `_keep_in_fp32_modules_strict`. of_diffusers: whether to
    treat the first list like the second, as diffusers does.
    """
    kept = [tree.modules[name].keep_in_fp32 or "" for name in ancestors(tensor.name)]
    kept.append(tree.kept_in_fp32.get(tensor.name, ""))
    strict = any("_keep_in_fp32_modules_strict" in why for why in kept) and dtype in ("float16", "bfloat16")
    plain = any("_keep_in_fp32_modules" in why for why in kept)
    plain = plain and (dtype == "float16" or (of_diffusers and dtype == "bfloat16"))
    return "float32" if strict or plain else dtype


Kind = tuple[str, bool]
"""What decides how a weight is loaded: (its format, whether it belongs to experts that are packed)."""


def outcomes(kinds: Collection[Kind], wide: str) -> dict[Kind, tuple[Outcome, Outcome]]:
    """Return, for each kind of weight, (the outcome without further arguments, the outcome with `dequantize=True`). wide: the dtype
    in `config.json`.
    """
    found = {}
    formats = {dtype for dtype, expert in kinds if not expert}
    # With `dequantize=True`, transformers applies one scheme of compressed-tensors to all linear layers.
    schemes = {(layout(dtype), str(weight_scheme(dtype))) for dtype in formats}
    one_format = formats <= set(PER_CHANNEL) or "fp8" in map(layout, formats) or len(schemes) == 1
    for kind in kinds:
        facts = loader_facts(*kind)
        dequantized = facts.outcome(wide, True) if kind[1] or one_format else Outcome.TAKEN_FOR_ONE_FORMAT
        found[kind] = facts.outcome(wide, False), dequantized
    return found


def loader_facts(dtype: str, expert: bool) -> LoaderFacts:
    """Return what transformers loads for weights in the format `dtype`. expert: whether they belong to experts."""
    name, blocks = layout(dtype), dtypes.BY_NAME[dtype].blocks
    if expert:
        return _ALWAYS_SAME if blocks is None or name == "fp8" else _WIDENED_EXPERTS
    return _ZERO_POINTS if blocks is not None and blocks.zero_points else _LAYERS[name]


_EXPERTS_BESIDE_OTHERS = ("float8_e4m3fn", "float8_e4m3fn@tensor")
"""Formats of experts that transformers loads even if other experts have other formats."""
EXPERTS_ALONE = (
    *(name for name in dtypes.STORED_FORMATS if name.startswith("mxfp4")), "int4@g128", "int4@g32", "int8@g128",
)  # fmt: skip
"""Formats of experts that transformers loads only if all experts of the model have the same format."""


def _is_float8(dtype: str) -> bool:
    row = dtypes.BY_NAME[dtype]
    return row.kind == "float" and row.bits == 8


def why_not_loaded(dtype: str, expert: bool, beside_experts: bool, wide: str) -> str | None:
    """Return why `from_pretrained` without further arguments does not correctly load and run a model with a weight in the format
    `dtype`, or None if it does. dtype: a format that other programs can read.

    expert: whether the weight belongs to experts that transformers packs. beside_experts: whether it belongs to another layer of a
    model with such experts, which may be stored without scales. wide: the dtype in `config.json`.
    """
    if layout(dtype) == "fp8":
        return "it needs the accelerate package, and its layout allows no other formats"
    if expert:
        return misread_experts((dtype,))
    if beside_experts and not _is_float8(dtype):
        return "beside experts without scales it reads 8-bit floats alone"
    outcome = loader_facts(dtype, expert).outcome(wide, dequantize=False)
    return str(outcome).format(wide=wide) if outcome in (Outcome.FAILS_TO_LOAD, Outcome.FAILS_TO_RUN) else None


def misread_experts(formats: Collection[str], first: str = "", split: bool = False) -> str | None:
    """Return what `from_pretrained` does wrong with experts that it packs, such as "it raises an error when it packs experts in
    mxfp8". Returns None if it loads them correctly, or if their layout is not that of compressed-tensors.

    The settings contain groups of layers, each with a format. transformers decodes all experts by one group (`get_experts_scheme`
    in `integrations/compressed_tensors.py`): the first group whose targets are the experts of a layer, or else the first group of
    all. It accepts experts without scales only if the format of this group is an 8-bit float.

    formats: the dtypes of all packed experts, including dtypes without scales. first: the format of the first group, or "" if no
    linear layer has scales. split: whether some layer has experts in several formats. Then no target matches all experts of that
    layer.
    """
    scaled = {dtype for dtype in formats if dtype in dtypes.STORAGE_DTYPES}
    if not formats or not {*scaled, *([first] if first else [])} <= set(DESCRIBED):
        return None
    if scaled <= set(_EXPERTS_BESIDE_OTHERS):
        if first and (split or not scaled) and not _is_float8(first):
            return f"it takes experts without scales to be in the format of other layers, {first}"
        return None
    if "nvfp4" in scaled:
        return "it ignores the scale of the tensor of experts in nvfp4 and computes wrong values without an error"
    if unread := sorted(scaled.difference(_EXPERTS_BESIDE_OTHERS, EXPERTS_ALONE)):
        return f"it raises an error when it packs experts in {', '.join(unread)}"
    if len(set(formats)) > 1:
        return "it takes all experts to be in one format when it packs them"
    return None
