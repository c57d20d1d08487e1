"""Weights in the blocks of llama.cpp, such as Q4_K. They are in GGUF files, which `checkpoint/gguf_model.py` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtype_engine.checkpoint.schemes.scheme import CodedWeight, Scheme
from dtype_engine.core.llama_types import LLAMA_TYPES

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""The tensors of a rotary embedding's factors, which become entries of the model's configuration."""
DECODED_HERE = ("Q1_0",)
"""Types that neither transformers nor the gguf package dequantizes, and `runtime/formats/schemes/gguf.py` does."""
_INPUTS_AS = {"mxfp4": "q8_0", "q1_0": "q8_0", "iq1_s": "iq2_s", "iq1_m": "iq2_s"}
"""Types that are in GGUF files but not in `core.llama_types`, with one whose inputs llama.cpp rounds to the same type."""


def _input_format(weight: CodedWeight, settings: Mapping[str, Any]) -> str:
    """Return a type of `core.llama_types` for which llama.cpp rounds inputs as for the weight's own, or "" if there is none."""
    kind = weight.format.removeprefix("gguf:")
    alike = _INPUTS_AS.get(kind, kind)
    return alike if alike in LLAMA_TYPES else ""


SCHEME = Scheme("gguf", "gguf", describing=ROPE_FACTORS, input_format=_input_format)
