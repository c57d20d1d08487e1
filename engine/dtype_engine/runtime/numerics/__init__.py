"""Quantize and dequantize, metrics, round-trip errors: tensors in, numbers out."""
