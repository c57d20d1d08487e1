"""Arithmetic on tensors: quantizing and dequantizing, metrics, and round-trip errors."""
