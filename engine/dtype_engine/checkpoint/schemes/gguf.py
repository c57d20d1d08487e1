"""Weights in the blocks of llama.cpp, such as Q4_K. They are in GGUF files, which `checkpoint/gguf_model.py` reads."""

from __future__ import annotations

from dtype_engine.checkpoint.schemes.scheme import Scheme

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""The tensors of a rotary embedding's factors, which become entries of the model's configuration."""
SCHEME = Scheme("gguf", "gguf", describing=ROPE_FACTORS)
