"""Weights to which a PEFT adapter adds something. The parts are those of the weight in the base model and those of the adapter.

LoRA adds `scale * B @ A` to a weight [out, in], where A is [rank, in] and B is [out, rank]. In DoRA, each row of the sum is then
scaled to the length that a magnitude vector [out] gives it. `checkpoint/adapter.py` makes these weights.
"""

from __future__ import annotations

from dtype_engine.checkpoint.schemes.scheme import Scheme

A, B, BIAS, MAGNITUDE = "lora_A", "lora_B", "lora_B.bias", "lora_magnitude_vector"
"""The keys in `CodedWeight.parts` of the adapter's tensors. The other parts are those of the weight in the base model."""

BASE = "base"
"""The key in `CodedWeight.settings` of the `CodedWeight` in the base model, if that is stored as codes."""
SCALE = "scale"
"""The key of the factor of B @ A, a float."""
TRANSPOSED = "transposed"
"""The key of whether the product is transposed before it is added: True for embeddings and for a Conv1D of GPT-2."""
EXPERTS = "experts"
"""The key of the number of experts whose matrices A and B hold: A is [experts * rank, in] and B is [out, rank * experts]."""
EXPERT = "expert"
"""The key of (expert, first row, row after the last) if the weight is of one expert, and is these rows of its product."""

SCHEME = Scheme("lora", "lora")
