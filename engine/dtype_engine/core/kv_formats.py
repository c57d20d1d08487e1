"""The formats of a KV cache: their names, scales and bytes.

A KV cache consists of tensors [batch, heads, tokens, width], such as the keys of one layer. The formats are those that runtimes
offer: vLLM, TensorRT-LLM (NVFP4) and KIVI (Liu et al., 2024). `engine/docs/kv-cache.md` says what each of them means. Those of vLLM
are as in version 0.33 (`vllm/config/cache.py`, `CacheDType`). Recurrent states have formats of their own
(`engine/docs/recurrent-states.md`), of which most are those of a cache as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.kv_cache import KV_CACHE, PARTS, STATES, KVCacheTensor
from dtype_engine.core.suggest import nearest

SCANNED = "kv:"
"""The prefix in a scan's list of dtypes for a format of KV caches, as in `kv:fp8`."""
GROUP, WINDOW = 32, 128
"""For KIVI: how many values share a scale, and how many of the newest tokens keep unrounded values."""


class KVFormat(msgspec.Struct, frozen=True):
    """One format of a KV cache."""

    name: str
    dtype: str
    """A key of `dtypes.BY_NAME`: the dtype of an element, or a block format. "" for integers with zero points and TurboQuant."""
    scales: Literal["none", "tensor", "head", "token", "blocks", "kivi", "turboquant"] = "none"
    """Which values share a scale. "tensor": all. "head": those of a head. "token": those of one token in one head. "blocks":
    those of a block within one token and head. "kivi": for keys, those of one channel in `GROUP` tokens; for values, those of
    one token in `GROUP` channels. "turboquant": those of one token in one head; for keys, the scale is their norm.
    """
    bits: int = 0
    """The number of bits of an element, without scales."""
    value_bits: int = 0
    """For TurboQuant, the number of bits of an element of the values; `bits` are then those of the keys."""
    queries: bool = False
    """Whether attention rounds queries, too: to float8_e4m3fn without a scale. A format of keys decides this."""

    @property
    def calibrated(self) -> bool:
        """Whether scales are computed once, from the calibration inputs, and then kept for all tokens."""
        return self.scales in ("tensor", "head") or self.dtype == "nvfp4"

    def why_not(self, tensor: KVCacheTensor) -> str | None:
        """Return why a tensor of a cache can't have the format, for the user, or None if it can."""
        latent = tensor.part in ("latent", "rope")
        if self.queries and latent:
            return "the queries of multi-head latent attention are rounded in another place, which is not measured"
        if self.scales != "turboquant":
            return None
        width = tensor.per_token // tensor.heads
        if latent:
            return "vLLM has no TurboQuant for multi-head latent attention"
        if self.bits < 8 and (width < 8 or width & (width - 1)):
            return f"TurboQuant takes heads whose width is a power of two from 8 on, and these have {width} channels"
        return None

    def nbytes(self, shape: Sequence[int], keys: bool) -> int:
        """Return the bytes of a tensor with `shape` [batch, heads, tokens, width], scales included. keys: whether it holds
        keys, to which KIVI gives other groups than to values.
        """
        batch, heads, tokens, width = shape
        if self.scales == "kivi":
            rounded = tokens - tokens % WINDOW if keys else max(0, tokens - WINDOW)
            groups = rounded // GROUP * width if keys else rounded * -(-width // GROUP)
            whole = rounded * width * self.bits // 8 + 4 * groups + 2 * (tokens - rounded) * width
            return batch * heads * whole
        if self.scales == "blocks":
            block = dtypes.BY_NAME[self.dtype].blocks
            assert block is not None
            scale = 1 if block.tensor_scale else 2
            of_row = -(-width * self.bits // 8) + scale * -(-width // block.columns)
            return batch * heads * tokens * of_row + (dtypes.SCALE_BYTES if block.tensor_scale else 0)
        if self.scales == "turboquant":
            # An fp8 key has no scale, a rounded key a norm in float16, and a value a scale and a minimum in float16.
            beside = 4 if not keys else 2 if self.bits < 8 else 0
            return batch * heads * tokens * (-(-width * (self.bits if keys else self.value_bits) // 8) + beside)
        scales = {"none": 0, "tensor": 1, "head": heads, "token": batch * heads * tokens}[self.scales]
        return math.prod((batch, heads, tokens)) * -(-width * self.bits // 8) + dtypes.SCALE_BYTES * scales


_FP8 = "float8_e4m3fn"
STOCHASTIC = "float16@stochastic"
"""float16 of which each value is rounded up or down at random, so that the mean error is 0. Only states of recurrences have it, in
vLLM, SGLang and TensorRT-LLM.
"""
KV_FORMATS = {
    each.name: each
    for each in (
        *(KVFormat(name, name, "none", dtypes.BY_NAME[name].bits) for name in ("float32", "bfloat16", "float16")),
        KVFormat(_FP8, _FP8, "none", 8),
        KVFormat("float8_e5m2", "float8_e5m2", "none", 8),
        KVFormat(_FP8 + dtypes.PER_TENSOR, _FP8, "tensor", 8),
        KVFormat("fp8@head", _FP8, "head", 8),
        KVFormat("fp8@token", _FP8, "token", 8),
        KVFormat("int8@token", "int8", "token", 8),
        KVFormat("int4@token", "", "token", 4),
        KVFormat("int4@g32", "int4@g32", "blocks", 4),
        KVFormat("nvfp4", "nvfp4", "blocks", 4),
        KVFormat("int4@kivi", "", "kivi", 4),
        KVFormat("int2@kivi", "", "kivi", 2),
        KVFormat("tq@k8v4", "", "turboquant", 8, 4),
        KVFormat("tq@k4v4", "", "turboquant", 4, 4),
        KVFormat("tq@k3v4", "", "turboquant", 3, 4),
        KVFormat("tq@k3v3", "", "turboquant", 3, 3),
        KVFormat(STOCHASTIC, "float16", "none", 16),
    )
}
"""All formats of a KV cache, keyed by their name in rules."""
QUERIES = "+q"
"""The end of the name of a format with which attention rounds queries, too, as in `fp8@tensor+q`."""
_STORED_AS = {
    name.replace(_FP8, "fp8") + QUERIES: name for name in (_FP8, _FP8 + dtypes.PER_TENSOR, "fp8@head", "nvfp4")
}
KV_FORMATS |= {
    name: msgspec.structs.replace(KV_FORMATS[stored], name=name, queries=True) for name, stored in _STORED_AS.items()
}
ONLY_KV = frozenset(KV_FORMATS) - frozenset(dtypes.CASTABLE_DTYPES)
"""The names of the formats that KV caches can have and weights can't."""
STATE_FORMATS = {
    "conv_state": ("float32", "bfloat16", "float16"),
    "ssm_state": ("float32", "bfloat16", "float16", STOCHASTIC),
}
"""The formats that a state of a recurrent layer can have, by its part of `STATES`: those of vLLM's `MambaDType` and SGLang's
`--mamba-ssm-dtype`.
"""


def may_have(part: str, form: str) -> bool:
    """Return whether a cache tensor that holds `part`, one of `PARTS`, may have a format of `KV_FORMATS` or `dtypes.STORED`."""
    if form == dtypes.STORED:
        return True
    return form in STATE_FORMATS[part] if part in STATES else form in KV_FORMATS and form != STOCHASTIC


def why_no_state(form: str) -> str:
    """Return a sentence part that says that recurrent states can't have a format, and which they can have."""
    if form == STOCHASTIC:
        return (
            f"convolutions can't be {_typed(form)}: they may be {', '.join(map(_typed, STATE_FORMATS['conv_state']))}"
        )
    names = ", ".join(map(_typed, STATE_FORMATS["conv_state"]))
    return (
        f"recurrent states can't be {_typed(form)}: they may be {names}, or, but for convolutions, {_typed(STOCHASTIC)}"
    )


OF_VLLM = {
    **{f"{name}_per_token_head": f"{name}@token" for name in ("fp8", "int8", "int4")},
    "turboquant_k8v4": "tq@k8v4", "turboquant_4bit_nc": "tq@k4v4", "turboquant_k3v4_nc": "tq@k3v4",
    "turboquant_3bit_nc": "tq@k3v3",
}  # fmt: skip
"""Formats of `KV_FORMATS` by vLLM's names, where no other format has this name."""
NOT_MEASURED = {
    "auto": "it is the dtype in which the model computes: give the cache that dtype, or stored",
    "fp8_inc": "vLLM has it for Intel Gaudi",
    "fp8_ds_mla": "vLLM has it for sparse attention like that of DeepSeek V3.2",
    "nvfp4_ds_mla": "vLLM has it for sparse attention like that of DeepSeek V3.2",
    "nvfp4_4over6": "vLLM has it, and chooses between two scales for each block; nvfp4 has one",
    "octave_k3v4": "vLLM has it for AMD GPUs",
    "octave_k3v3": "vLLM has it for AMD GPUs",
    "octave_k3v3_compact": "vLLM has it for AMD GPUs",
    "ultraquant_4bit": "vLLM has it for AMD GPUs",
}
"""What runtimes call formats of KV caches that are not in `KV_FORMATS`, and what is known of each."""


def stored_as(name: str) -> str:
    """Return the name of the format in which a cache is stored whose format is `name`: the same without `QUERIES` at its end."""
    return _STORED_AS.get(name, name)


def with_queries(name: str) -> str | None:
    """Return the name of the format that is stored like `name`, and with which attention rounds queries. Returns None if there is
    none, or if `name` is it.
    """
    return next((each for each, stored in _STORED_AS.items() if stored == name), None)


def names_caches(pattern: str) -> bool:
    """Return whether a pattern names KV caches, as `*.kv_cache` or `*.kv_cache.k` do."""
    return KV_CACHE in pattern


def may_name_caches(pattern: str) -> bool:
    """Return whether a pattern may match tensors of KV caches: it names them, or ends in a name of `PARTS`, as `*.v`."""
    return names_caches(pattern) or not _last_words(pattern).isdisjoint(PARTS)


def names_states_alone(pattern: str) -> bool:
    """Return whether a pattern ends in names of `STATES` alone, as `*.ssm_state` and `*.{conv,ssm}_state` do."""
    return _last_words(pattern).issubset(STATES)


def _last_words(pattern: str) -> set[str]:
    """Return what the last part of a pattern names: {"k", "v"} for `*.{k,v}`."""
    before, opened, last = pattern.rpartition(".")[2].partition("{")
    words, _, after = last.partition("}")
    return {before + word.strip() + after for word in words.split(",")} if opened else {before}


def parse_format(text: str) -> str:
    """Parse a format (`fp8`, `bf16`, `int4@kivi`, `stored`) to a name in `KV_FORMATS` or `dtypes.STORED`. Raises UserError."""
    whole = text.strip().lower().removeprefix("torch.")
    whole = OF_VLLM.get(whole, whole)
    if whole in KV_FORMATS:
        return whole
    if whole in NOT_MEASURED:
        raise UserError(f"a KV cache in {whole} can't be measured: {NOT_MEASURED[whole]}")
    if whole.endswith(QUERIES):
        if (found := with_queries(parse_format(whole.removesuffix(QUERIES)))) is not None:
            return found
        raise UserError(
            f"a KV cache can't be {text.strip()!r}: the formats with which queries are rounded are {', '.join(_STORED_AS)}"
        )
    word, _, scales = whole.partition("@")
    if word in ("float8_e4m3fn", "e4m3", "fp8_e4m3") and f"fp8@{scales}" in KV_FORMATS:
        return f"fp8@{scales}"
    if whole in (f"{word}@stochastic" for word in ("f16", "fp16", "half")):
        return STOCHASTIC
    try:
        found = dtypes.parse_target(whole)
    except UserError:
        found = ""
    if found in KV_FORMATS or found == dtypes.STORED:
        return found
    known = list(map(_typed, KV_FORMATS))
    near = nearest(whole, known, cutoff=0.5)
    hint = f"did you mean {near}? It may be" if near else "it may be"
    raise UserError(f"a KV cache can't be {text.strip()!r}: {hint} {', '.join(known)}, or {dtypes.STORED}")


def completions(pattern: str, begun: str) -> list[str]:
    """Return the names of the formats that begin with `begun`, of those that the KV caches may have that a pattern names."""
    whole, states = begun.strip().lower(), names_states_alone(pattern)
    names = (name for name in KV_FORMATS if not states or any(may_have(part, name) for part in STATES))
    return [name for name in (*map(_typed, names), dtypes.STORED) if name.startswith(whole)]


def _typed(name: str) -> str:
    return name.replace(_FP8, "fp8").replace("float16", "f16") if "@" in name else dtypes.short_name(name)


def parse_scanned(text: str) -> str:
    """Parse an entry of a scan's dtypes: a dtype of weights, or `kv:` and a format of KV caches. Raises UserError."""
    whole = text.strip()
    return SCANNED + parse_of_tokens(whole[len(SCANNED) :]) if whole.startswith(SCANNED) else dtypes.parse_target(whole)


def parse_of_tokens(text: str) -> str:
    """Parse a format of keys and values, as `parse_format` does. Raises UserError, also for a format that only states have."""
    if (form := parse_format(text)) == STOCHASTIC:
        raise UserError(f"keys and values can't be {form}: only states of recurrences can")
    return form


def format_of_caches(text: str) -> str | None:
    """Return the name of the format `text` if only KV caches have it, otherwise None."""
    try:
        found = parse_format(text)
    except UserError:
        return None
    return found if found in ONLY_KV else None
