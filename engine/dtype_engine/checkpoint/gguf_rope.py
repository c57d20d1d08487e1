"""Describes the rotary embedding of a GGUF file as the configuration of transformers has it.

llama.cpp divides the angle of each frequency by `rope.scaling.factor` and by a factor that a tensor of the file gives for this
frequency, and multiplies sine and cosine by `rope.scaling.attn_factor`. In transformers, "longrope" is the rule that accepts any
factors: short ones for sequences up to the original length of the context, and long ones for longer sequences.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.gguf import ROPE_FACTORS
from dtype_engine.checkpoint.schemes.small_tensors import read_small

FREQUENCIES, LONG, SHORT = ROPE_FACTORS
_KIND, _FACTOR, _LEGACY_FACTOR = "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"
_ATTENTION, _LENGTH = "rope.scaling.attn_factor", "rope.scaling.original_context_length"
_DIMENSIONS, _EXTRAPOLATION = "rope.dimension_count", "rope.scaling.yarn_ext_factor"
_BETAS = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
FIELDS = frozenset({_KIND, _FACTOR, _LEGACY_FACTOR, _ATTENTION, _LENGTH, _DIMENSIONS, _EXTRAPOLATION, *_BETAS})
"""The fields that `describe_rope` reads, without the architecture before their names."""


@dataclass(slots=True)
class Rope:
    """The rotary embedding of a GGUF file."""

    config: dict[str, Any] = field(default_factory=dict)
    """The entries of config.json."""
    lost: list[str] = field(default_factory=list)
    """The names of the fields and tensors that these entries can't express."""


def describe_rope(
    own: Mapping[str, Any], tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any], only_longrope: bool
) -> Rope:
    """Return the rotary embedding. own: the fields of the header, without the architecture before their names. config: the other
    entries of config.json. only_longrope: whether the model class has only the rule "longrope", which is so for Phi-3. Only such a
    class can rotate a part of each head. Raises UserError if factors can't be read.
    """
    found = Rope()
    rotated = _partial(own, config, only_longrope, found)
    scale = _number(own, _FACTOR, _number(own, _LEGACY_FACTOR, 1.0, found), found) or 1.0  # llama.cpp takes 0 as 1
    attention = _number(own, _ATTENTION, 1.0, found)
    context = config.get("max_position_embeddings", 2048)
    length = own.get(_LENGTH, context)
    if type(length) is not int or type(context) is not int or length < 1:
        found.lost.append(_LENGTH)
        length = context = 1
    kind = own.get(_KIND, "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        found.lost.append(_KIND)
    extrapolation = _number(own, _EXTRAPOLATION, -1.0, found)
    if extrapolation not in ((-1.0, 1.0) if kind == "yarn" else (-1.0, 0.0)):
        found.lost.append(_EXTRAPOLATION)
    pair = _factors(tensors, rotated // 2, found)
    if kind == "yarn" and scale != 1.0:
        if pair is not None or only_longrope:
            found.lost.append(_KIND)
        found.config["rope_scaling"] = {
            "rope_type": "yarn", "factor": scale, "original_max_position_embeddings": length,
            **({} if attention == 1.0 else {"attention_factor": attention * (1 + 0.1 * math.log(scale))}),
            **{entry: _number(own, name, 0.0, found) for name, entry in _BETAS.items() if name in own},
        }  # fmt: skip
        return found
    if kind == "none":
        scale = 1.0
    if kind == "longrope" and pair is None:
        found.lost.append(_KIND)
    if pair is None and attention == 1.0 and (scale == 1.0 or not only_longrope):
        if scale != 1.0:
            found.config["rope_scaling"] = {"rope_type": "linear", "factor": scale}
        return found
    short, long = pair or ([1.0] * (rotated // 2),) * 2
    found.config["rope_scaling"] = {
        "rope_type": "longrope", "short_factor": [scale * factor for factor in short],
        "long_factor": [scale * factor for factor in long], "original_max_position_embeddings": length,
    }  # fmt: skip
    if only_longrope:  # its configuration has a default of its own for this length
        found.config["original_max_position_embeddings"] = length
    usual = math.sqrt(1 + math.log(context / length) / math.log(length)) if context > length > 1 else 1.0
    if not only_longrope or not math.isclose(attention, usual, rel_tol=1e-6):  # transformers takes the usual factor
        found.config["rope_scaling"] |= {"attention_factor": attention, "factor": 1.0}
    return found


def _partial(own: Mapping[str, Any], config: Mapping[str, Any], possible: bool, found: Rope) -> int:
    """Return how many elements of each head are rotated, and add their share to `found` unless all are rotated. possible: whether
    the model class can rotate a part of them.
    """
    head: int = config["head_dim"]
    rotated = own.get(_DIMENSIONS, head)
    if rotated == head and type(rotated) is int:
        return head
    if type(rotated) is not int or not 0 < rotated < head or rotated % 2 or not possible:
        found.lost.append(_DIMENSIONS)
        return head
    share = rotated / head
    found.config["partial_rotary_factor"] = share if int(head * share) == rotated else math.nextafter(share, 1)
    return rotated


def _number(own: Mapping[str, Any], name: str, default: float, found: Rope) -> float:
    """Return the number in the field `name` of `own`, or `default` if the field is missing or is not a finite number. In the latter
    case, the name is added to `found.lost`.
    """
    value = own.get(name, default)
    if type(value) in (int, float) and math.isfinite(value):
        return float(value)
    found.lost.append(name)
    return default


def _factors(
    tensors: Mapping[str, CheckpointTensor], count: int, found: Rope
) -> tuple[list[float], list[float]] | None:
    """Return (`count` factors for short sequences, `count` factors for long ones), or None if the file has no usable ones. Names of
    tensors that can't be used are added to `found.lost`.
    """
    read: dict[str, list[float]] = {}
    for name in sorted(set(ROPE_FACTORS) & tensors.keys()):
        tensor = tensors[name]
        if tensor.dtype == "float32" and tensor.refusal is None and tensor.shape == (count,):
            read[name] = list(struct.unpack(f"<{count}f", read_small(tensor)))
            if all(math.isfinite(factor) and factor > 0 for factor in read[name]):
                continue
        found.lost.append(name)
    if FREQUENCIES in read and len(read) == 1:
        return read[FREQUENCIES], read[FREQUENCIES]
    if read.keys() == {LONG, SHORT}:
        return read[SHORT], read[LONG]
    found.lost += [name for name in read if name not in found.lost]
    return None
