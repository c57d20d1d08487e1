"""The facts from which the README of an export is written: what transformers gives for weights that are stored with scales.

Each entry was tried with transformers 5.23 and compressed-tensors 0.20 (the layout of DeepSeek's fp8 with accelerate 1.15), and the
tests try each again with the installed versions.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass
from enum import StrEnum

from dtype_engine.core import dtypes
from dtype_engine.recipe.schemes import PER_CHANNEL, layout, weight_scheme


class Outcome(StrEnum):
    """What loading gives compared with the values of `load_pretrained`, as the README says it. `{wide}` is the dtype in
    `config.json`.
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
    """What `from_pretrained` gives for weights of one kind, depending on the dtype that `config.json` names."""

    plain: Outcome
    """The outcome without further arguments."""
    plain_same_in: Container[str]
    """The dtypes in `config.json` with which the outcome is `SAME` instead."""
    dequantized: Outcome
    """The outcome with `CompressedTensorsConfig(dequantize=True)`."""
    dequantized_same_in: Container[str]

    def outcome(self, wide: str, dequantize: bool) -> Outcome:
        """What loading gives when `config.json` names the dtype `wide`."""
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
"""Linear layers, by the layout of their weights."""
_ZERO_POINTS = LoaderFacts(Outcome.FAILS_TO_LOAD, (), Outcome.BFLOAT16, ("bfloat16",))
_WIDENED_EXPERTS = LoaderFacts(Outcome.COMPUTED_IN_BFLOAT16, ("bfloat16",), Outcome.COMPUTED_IN_BFLOAT16, ("bfloat16",))
"""Experts in blocks, which transformers dequantizes as it packs them."""


Kind = tuple[str, bool]
"""A format that other programs read, and whether its weights are experts that loading packs; otherwise they are linear layers."""


def outcomes(kinds: Collection[Kind], wide: str) -> dict[Kind, tuple[Outcome, Outcome]]:
    """What loading gives for each kind of weight in an export: plainly, and with `dequantize=True`.

    wide: the dtype that `config.json` names.
    """
    found = {}
    one_format = _one_format([dtype for dtype, expert in kinds if not expert])
    for kind in kinds:
        facts = loader_facts(*kind)
        dequantized = facts.outcome(wide, True) if kind[1] or one_format else Outcome.TAKEN_FOR_ONE_FORMAT
        found[kind] = facts.outcome(wide, False), dequantized
    return found


def _one_format(formats: Collection[str]) -> bool:
    """Whether transformers, which dequantizes all linear layers by the scheme of one of them, reads all of these formats so."""
    if set(formats) <= set(PER_CHANNEL) or "fp8" in map(layout, formats):
        return True
    return len({(layout(dtype), str(weight_scheme(dtype))) for dtype in formats}) == 1


def loader_facts(dtype: str, expert: bool) -> LoaderFacts:
    """The facts about one kind of weight."""
    name, blocks = layout(dtype), dtypes.BY_NAME[dtype].blocks
    if expert:
        return _ALWAYS_SAME if blocks is None or name == "fp8" else _WIDENED_EXPERTS
    return _ZERO_POINTS if blocks is not None and blocks.zero_points else _LAYERS[name]
